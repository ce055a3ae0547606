// Shows growing text in pieces of whole lines, so that only the last pieces are built and laid out again.

import { el } from "./dom.js";

const NUM_LINES = 30; // lines of a piece
// Lines of a piece that had to be extended.
const MAX_LINES = 120;

// Appends text to an array of lines.
function extend(lines, text) {
  const [first, ...others] = text.split("\n");
  lines[lines.length - 1] += first;
  for (const line of others) lines.push(line);
}

// `dress` returns the nodes of some lines, and whether they can be a piece of their own. If not, the piece takes
// in more lines, up to a limit.
export class Pieces {
  constructor(root, dress = (text) => [[text], true]) {
    this.root = root;
    this.dress = dress;
    // The line after the pieces that are final.
    this.at = 0;
    // Pieces that may change.
    this.rest = [];
  }

  // Shows the lines; those from `numFinal` on may change until the next call. Returns whether all are shown.
  show(lines, numFinal, deadline) {
    for (const node of this.rest.splice(0)) node.remove();
    for (let at = this.at; at < lines.length; ) {
      const [nodes, end] = this.piece(lines, at);
      const piece = el("span", { class: "piece" }, ...nodes);
      this.root.append(piece);
      at = end;
      if (!this.rest.length && end < Math.min(numFinal, lines.length)) {
        this.at = end;
        if (performance.now() > deadline) return false;
      } else this.rest.push(piece);
    }
    return true;
  }

  piece(lines, at) {
    for (let num = NUM_LINES; ; num *= 2) {
      const end = Math.min(at + num, lines.length);
      const text = lines.slice(at, end).join("\n") + (end < lines.length ? "\n" : "");
      const [nodes, isWhole] = this.dress(text);
      if (isWhole || end === lines.length || num >= MAX_LINES) return [nodes, end];
    }
  }
}

export class TextView {
  constructor(root) {
    this.root = root;
    this.begin();
  }

  begin() {
    this.root.replaceChildren();
    this.show = this.shower();
    this.text = "";
    this.lines = [""];
    this.isShown = true;
  }

  // Returns a function of lines and a deadline, which shows them and returns whether all are shown.
  shower() {
    const pieces = new Pieces(this.root);
    return (lines, deadline) => pieces.show(lines, lines.length - 1, deadline);
  }

  // Shows as much as it can by the deadline; returns whether all is shown.
  update(text, deadline = Infinity) {
    if (!text.startsWith(this.text)) this.begin();
    if (text === this.text && this.isShown) return true;
    extend(this.lines, text.slice(this.text.length));
    this.text = text;
    this.isShown = this.show(this.lines, deadline);
    return this.isShown;
  }
}
