// Text that grows, shown as it is, in pieces of whole lines: only the last ones are built and laid
// out again.

import { el } from "./dom.js";

const NUM_LINES = 30; // of a piece

// Adds text to lines.
function extend(lines, text) {
  const [first, ...others] = text.split("\n");
  lines[lines.length - 1] += first;
  for (const line of others) lines.push(line);
}

// `dress`: the nodes of a piece, and what the next piece's call is given.
export class Pieces {
  constructor(root, dress = (text) => [[text], null]) {
    this.root = root;
    this.dress = dress;
    this.num = 0; // pieces that are kept
    this.state = null; // behind them
    this.rest = []; // pieces that may change
  }

  // Lines from `numFinal` on may change until the next call. Says whether all are shown.
  show(lines, numFinal, deadline) {
    for (const node of this.rest.splice(0)) node.remove();
    let state = this.state;
    for (let at = this.num * NUM_LINES; at < lines.length; at += NUM_LINES) {
      const end = at + NUM_LINES;
      const text = lines.slice(at, end).join("\n") + (end < lines.length ? "\n" : "");
      const [nodes, after] = this.dress(text, state);
      const piece = el("span", { class: "piece" }, ...nodes);
      this.root.append(piece);
      state = after;
      if (end < Math.min(numFinal, lines.length)) {
        [this.num, this.state] = [this.num + 1, state];
        if (performance.now() > deadline) return false;
      } else this.rest.push(piece);
    }
    return true;
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
