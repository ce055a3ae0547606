// Shows growing Markdown. markdown-it parses it, and its tokens become nodes, never HTML.
//
// The text is parsed in windows of lines. Once a window is full, all its parts except for the last one are shown
// for good, and the next window begins with that last part. A part that fills a whole window is opened, and its
// contents are parsed in the same way. So each paint costs the same, however long the answer is, and the resulting
// nodes do not depend on how the text arrived.

import { Code } from "./code.js";
import { el } from "./dom.js";
import { blocksOf, itemsOf, linesOf, nodeOf, rowsOf } from "./tokens.js";
import { TextView } from "./text.js";

// Depth to which parts are opened.
const MAX_DEPTH = 6;
// Lines in a window.
const NUM_LINES = 40;
// Characters in a window, which has at least one line.
const NUM_CHARACTERS = 6000;

export class MarkdownView extends TextView {
  shower() {
    const blocks = new Parts(this.root, 0, blocksOf, 0);
    return (lines, deadline) => blocks.grow(lines, lines.length - 1, deadline) !== null;
  }
}

// Returns the line after a full window, or 0 if the window is not full.
function windowEnd(lines, at, numFinal) {
  let size = 0;
  for (let end = at; end < numFinal; end++) {
    size += lines[end].length;
    if (end + 1 - at >= NUM_LINES || size >= NUM_CHARACTERS) return end + 1;
  }
  return 0;
}

// The classes below have a node and a method `grow`, which shows lines. Lines from `numFinal` on may change until
// the next call. `grow` returns the line after the last one that belongs to it, or null if the deadline (in the
// time of performance.now()) came first.

// Shows the parts of a node: the blocks of a text, the items of a list, or the rows of a table.
class Parts {
  // `read` takes lines and returns {parts, to}, where `to` is the line at which something else begins.
  constructor(root, at, read, depth, node = root) {
    Object.assign(this, { root, at, read, depth, node });
    // The part that is longer than a window.
    this.open = null;
    // Views of the parts that are parsed again with each paint.
    this.loose = [];
  }

  grow(lines, numFinal, deadline) {
    for (;;) {
      if (this.open) {
        const next = this.open.grow(lines, numFinal, deadline);
        if (next === null) return null;
        if (next >= numFinal) return this.showLoose(lines, next);
        this.at = next;
        this.open = null;
      }
      const end = windowEnd(lines, this.at, numFinal);
      if (!end) return this.showLoose(lines, this.at);
      const { parts, to } = this.read(lines.slice(this.at, end));
      if (to < end - this.at) return this.showLoose(lines.slice(0, end), this.at);
      this.settle(parts, lines, end);
      if (performance.now() > deadline) return null;
    }
  }

  settle(parts, lines, end) {
    const last = parts.pop();
    for (const part of parts) this.keep(part);
    if (parts.length) this.at += last.from;
    else if (!last) this.at = end;
    else {
      this.open = opened(last, lines, this.at + last.from, this.depth + 1);
      if (this.open) return this.place(this.open.node);
      this.keep(last);
      this.at += last.to;
    }
  }

  keep(part) {
    if (this.loose[0]?.key === part.key) return this.loose.shift();
    this.root.insertBefore(viewOf(part).node, this.loose[0]?.node ?? null);
  }

  place(node) {
    for (const view of this.loose.splice(0)) view.node.remove();
    this.root.append(node);
  }

  showLoose(lines, at) {
    const { parts, to } = this.read(lines.slice(at));
    const shown = this.loose;
    this.loose = parts.map((part, k) => {
      const old = shown[k];
      if (old?.key === part.key || old?.takes(part)) return old;
      const view = viewOf(part);
      if (old) old.node.replaceWith(view.node);
      else this.root.append(view.node);
      return view;
    });
    for (const view of shown.slice(parts.length)) view.node.remove();
    return at + to;
  }
}

function viewOf(part) {
  if (part.type === "fence") return new CodeView(part);
  return { key: part.key, node: nodeOf(part), takes: () => false };
}

// Shows a piece of code that may grow.
class CodeView {
  constructor(part) {
    this.code = new Code(part.language);
    this.node = this.code.node;
    this.takes(part);
  }

  takes({ type, key, language, text }) {
    if (type !== "fence" || language !== this.code.language) return false;
    this.key = key;
    const lines = text.replace(/\n$/, "").split("\n");
    return this.code.show(lines, lines.length - 1, Infinity);
  }
}

// Returns a view of a part that fills a window, and that can still grow; null if it is shown as it is.
function opened(part, lines, at, depth) {
  const { type } = part;
  if (type === "fence") return new Fence(part, lines, at);
  if (type === "table_open") {
    const node = nodeOf(part);
    const body = node.querySelector("tbody");
    body?.replaceChildren();
    return body && new Parts(body, at + 2, rowsOf(lines.slice(at, at + 2)), depth, node);
  }
  if (type === "paragraph_open") return new Parts(el("p"), at, linesOf, depth);
  if (depth > MAX_DEPTH) return null;
  if (type === "blockquote_open") return new Nested(el("blockquote"), at, quoted, depth);
  if (type === "list_item_open") return new Nested(el("li"), at, within(lines[at]), depth);
  const tag = { bullet_list_open: "ul", ordered_list_open: "ol" }[type];
  return tag ? new Parts(el(tag, { start: part.start }), at, itemsOf(part), depth) : null;
}

// Shows the blocks within a quote or a list item, from lines without their marks.
class Nested {
  // `strip` returns a line without its mark, or null for a line that does not belong here.
  constructor(node, at, strip, depth) {
    this.node = node;
    this.next = at;
    this.strip = strip;
    this.lines = [];
    this.numFinal = 0;
    this.blocks = new Parts(node, 0, blocksOf, depth);
  }

  grow(lines, numFinal, deadline) {
    this.lines.length = this.numFinal;
    let next = this.next;
    for (; next < lines.length; next++) {
      const line = this.strip(lines[next], this.lines.length === 0);
      if (line === null) break;
      this.lines.push(line);
      if (next < numFinal) [this.next, this.numFinal] = [next + 1, this.lines.length];
    }
    return this.blocks.grow(this.lines, this.numFinal, deadline) === null ? null : next;
  }
}

const QUOTE = /^ {0,3}> ?/;
const quoted = (line) => (QUOTE.test(line) ? line.replace(QUOTE, "") : null);

function within(first) {
  const [mark, , spaces] = /^ {0,3}([-*+]|\d{1,9}[.)])( *)/.exec(first);
  const isEmpty = mark.length === first.length;
  const indent = isEmpty || spaces.length > 4 ? mark.length - spaces.length + 1 : mark.length;
  return (line, isFirst) => {
    if (isFirst) return line.slice(indent);
    if (!line.trim()) return "";
    const spaced = line.replace(/^\t+/, (tabs) => "    ".repeat(tabs.length));
    return /^ */.exec(spaced)[0].length >= indent ? spaced.slice(indent) : null;
  };
}

// Shows a fenced block of code by its lines.
class Fence {
  constructor({ language, markup }, lines, at) {
    this.code = new Code(language);
    this.node = this.code.node;
    this.indent = new RegExp(`^ {0,${/^ */.exec(lines[at])[0].length}}`);
    this.end = new RegExp(`^ {0,3}${markup[0]}{${markup.length},}[ \\t]*$`);
    this.lines = [];
    this.next = at + 1;
    this.numFinal = 0;
  }

  grow(lines, numFinal, deadline) {
    this.lines.length = this.numFinal;
    let next = this.next;
    for (; next < lines.length && !this.end.test(lines[next]); next++) {
      this.lines.push(lines[next].replace(this.indent, ""));
      if (next < numFinal) [this.next, this.numFinal] = [next + 1, this.lines.length];
    }
    if (!this.code.show(this.lines, this.numFinal, deadline)) return null;
    return next < lines.length ? next + 1 : next;
  }
}
