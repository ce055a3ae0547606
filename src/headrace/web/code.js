// Shows a piece of code with its language and a button that copies it.

import { copyButton, el } from "./dom.js";
import { highlight } from "./highlight.js";
import { Pieces } from "./text.js";

export class Code {
  constructor(language = "") {
    this.language = language;
    this.lines = [];
    const code = el("code");
    this.pieces = new Pieces(code, (text) => highlight(text, language));
    const head = el("div", { class: "code-head" }, el("span", {}, language || "text"), copyButton("Copy code", () => this.lines.join("\n")));
    this.node = el("div", { class: "code" }, head, el("pre", { tabindex: "0" }, code));
  }

  // Shows lines as Pieces does; the last line has no line end of its own.
  show(lines, numFinal, deadline) {
    this.lines = lines;
    return this.pieces.show(lines, numFinal, deadline);
  }
}
