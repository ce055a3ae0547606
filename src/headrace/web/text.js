// Text that grows, shown as it is, in pieces of whole lines: only the last ones are built and laid
// out again.

import { el } from "./dom.js";

const NUM_LINES = 30; // of a piece
const MAX_LINES = 120; // of one that had to take in more

// Adds text to lines.
function extend(lines, text) {
  const [first, ...others] = text.split("\n");
  lines[lines.length - 1] += first;
  for (const line of others) lines.push(line);
}

// `dress`: the nodes of some lines, and whether they make a piece of their own; if not, it takes
// in more lines, up to some limit.
export class Pieces {
  constructor(root, dress = (text) => [[text], true]) {
    this.root = root;
    this.dress = dress;
    this.at = 0; // the line behind what is kept
    this.rest = []; // pieces that may change
  }

  // Lines from `numFinal` on may change until the next call. Says whether all are shown.
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

  // A function of lines and a deadline, which says whether all are shown.
  shower() {
    const pieces = new Pieces(this.root);
    return (lines, deadline) => pieces.show(lines, lines.length - 1, deadline);
  }

  // Shows as much as it can by the deadline, and says whether that is all.
  update(text, deadline = Infinity) {
    if (!text.startsWith(this.text)) this.begin();
    if (text === this.text && this.isShown) return true;
    extend(this.lines, text.slice(this.text.length));
    this.text = text;
    this.isShown = this.show(this.lines, deadline);
    return this.isShown;
  }
}
