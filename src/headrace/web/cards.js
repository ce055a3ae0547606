// Shows the calls of tools and their results, each as a card that can be folded.

import { el } from "./dom.js";
import { entriesOf, valueOf } from "./structured.js";
import { TextView } from "./text.js";

export class Card {
  // `kind` is call or result.
  constructor(kind, name) {
    // The text that the tree shows.
    this.shown = null;
    this.title = el("strong", {}, name);
    this.inner = el("div", { class: "inner" });
    this.node = el("details", { class: `card ${kind}`, open: true }, el("summary", {}, el("span", { class: "soft" }, kind === "call" ? "Tool call" : "Result of"), this.title), this.inner);
  }

  // Shows complete text that is JSON as a tree.
  show(name, text, isWhole, deadline) {
    if (this.title.textContent !== name) this.title.textContent = name;
    const value = isWhole ? valueOf(text) : undefined;
    if (value === undefined) return this.showText(text, deadline);
    if (this.shown === text) return true;
    this.inner.replaceChildren(entriesOf(value));
    [this.shown, this.view] = [text, null];
    return true;
  }

  showText(text, deadline) {
    if (!this.view) {
      const source = el("pre", { tabindex: "0" });
      this.inner.replaceChildren(source);
      this.view = new TextView(source);
    }
    return this.view.update(text, deadline);
  }
}
