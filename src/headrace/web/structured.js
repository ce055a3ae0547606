// Shows JSON as a tree, whose branches are built when they are opened.

import { button, el } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { TextView } from "./text.js";

const NUM_AT_ONCE = 100; // entries of a branch
const NUM_OPEN = 2; // levels

// Returns the value of a text that is a JSON object or array with contents, else undefined.
export function valueOf(text) {
  if (!beginsData(text)) return undefined;
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

const beginsData = (text) => /^\s*(\{\s*["}]|\[\s*[{[])/.test(text);

const treeOf = (value) => el("div", { class: "tree" }, branch(null, value, 0));

// Returns a tree of the value's entries alone.
export function entriesOf(value) {
  const tree = el("div", { class: "tree" });
  fill(tree, Object.entries(value), Array.isArray(value), 0);
  return tree;
}

function branch(name, value, depth) {
  const label = name === null ? [] : [el("span", { class: "hl-attr" }, name), ": "];
  if (value === null || typeof value !== "object") return el("div", { class: "leaf" }, ...label, leaf(value));
  const entries = Object.entries(value);
  const [open, close, unit] = Array.isArray(value) ? ["[", "]", "item"] : ["{", "}", "field"];
  if (!entries.length) return el("div", { class: "leaf" }, ...label, open + close);
  const size = el("span", { class: "size" }, `${open} ${entries.length} ${unit}${entries.length > 1 ? "s" : ""} ${close}`);
  const inner = el("div", { class: "inner" });
  const build = () => node.open && !inner.firstChild && fill(inner, entries, Array.isArray(value), depth);
  const node = el("details", { on: { toggle: build } }, el("summary", {}, ...label, size), inner);
  node.open = depth < NUM_OPEN;
  build();
  return node;
}

function fill(inner, entries, isList, depth) {
  const rest = entries.splice(NUM_AT_ONCE);
  inner.append(...entries.map(([name, value]) => branch(isList ? Number(name) : name, value, depth + 1)));
  if (!rest.length) return;
  const more = button(`${rest.length} more`, () => (more.remove(), fill(inner, rest, isList, depth)));
  inner.append(more);
}

function leaf(value) {
  const kind = typeof value === "string" ? "string" : typeof value === "number" ? "number" : "literal";
  return el("span", { class: `hl-${kind}` }, JSON.stringify(value));
}

// Shows Markdown or JSON. JSON is shown as its source while it grows, and as a tree once it is complete.
export class AnswerView {
  constructor(root) {
    this.root = root;
  }

  update(text, deadline, isLive) {
    const kind = !beginsData(text) ? "text" : isLive ? "source" : valueOf(text) === undefined ? "text" : "tree";
    if (kind !== this.kind) this.begin(kind);
    if (kind !== "tree") return this.view.update(text, deadline);
    if (text !== this.shown) this.root.replaceChildren(treeOf(valueOf(text)));
    this.shown = text;
    return true;
  }

  begin(kind) {
    this.kind = kind;
    this.shown = null;
    this.root.replaceChildren();
    if (kind === "text") this.view = new MarkdownView(this.root);
    if (kind === "source") {
      const source = el("pre", { class: "source", tabindex: "0" });
      this.root.append(source);
      this.view = new TextView(source);
    }
  }
}
