// Shows Markdown that grows. Builds nodes, never HTML.
//
// A block is begun once and grows: what has been shown of a long table, list, quote or piece of
// code is not built again. Only the last lines are in doubt, since what follows may change what
// they are. `show` and `grow` stop at their deadline (as of performance.now()) and go on when they
// are called again.

import { copyButton, el } from "./dom.js";
import { highlight } from "./highlight.js";
import { Pieces, TextView } from "./text.js";

const MAX_DEPTH = 6;
const MAX_LINK = 2000;
const NUM_IN_DOUBT = 2; // lines at the end of a text; each depth has one more
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;
const QUOTE = /^ {0,3}> ?/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const DASHES = /^ {0,3}(?=.*\|)\|? *:?-+:? *(\| *:?-+:? *)*\|? *$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;

export class MarkdownView extends TextView {
  shower() {
    const blocks = new Blocks(this.root, 0);
    return (lines, deadline) => blocks.show(lines, deadline);
  }
}

// The blocks of a text, one node each. The last lines of the text may change until the next call.
class Blocks {
  constructor(root, depth) {
    this.root = root;
    this.depth = depth;
    this.at = 0; // the line where the last block that is kept begins
    this.last = null;
    this.rest = []; // nodes behind that block
  }

  show(lines, deadline) {
    const numFinal = lines.length - NUM_IN_DOUBT - this.depth;
    removeAll(this.rest);
    if (!this.isSettled) this.drop();
    while (this.at < lines.length) {
      if (!this.last) this.begin(lines, numFinal);
      const next = this.last.grow(lines, numFinal, deadline);
      if (next === null) return false;
      if (next + 1 >= numFinal) return this.showRest(lines, next);
      this.at = next;
      this.last = null;
      if (performance.now() > deadline) return false;
    }
    return true;
  }

  begin(lines, numFinal) {
    this.last = blockAt(lines, this.at, this.depth);
    this.isSettled = this.at + 1 < numFinal; // two lines say what a block is
    if (this.last.node) this.root.append(this.last.node);
  }

  drop() {
    this.last?.node?.remove();
    this.last = null;
  }

  showRest(lines, next) {
    for (let at = next; at < lines.length; ) {
      const block = blockAt(lines, at, this.depth);
      at = block.grow(lines, 0, Infinity);
      if (block.node) this.rest.push(block.node);
    }
    this.root.append(...this.rest);
    return true;
  }
}

function removeAll(nodes) {
  for (const node of nodes.splice(0)) node.remove();
}

// A block has a node and a method grow: the line behind the block, or null where time was short.
function blockAt(lines, at, depth) {
  const line = lines[at];
  let found;
  if (!line.trim()) return { node: null, grow: () => at + 1 };
  if ((found = FENCE.exec(line))) return new Fence(at, found);
  if ((found = HEADING.exec(line))) return whole(el(`h${Math.min(found[1].length + 2, 6)}`, {}, ...inline(found[2])), at);
  if (RULE.test(line)) return whole(el("hr"), at);
  if (beginsTable(lines, at)) return new Table(lines, at);
  if (depth < MAX_DEPTH && QUOTE.test(line)) return new Quote(at, depth);
  if (depth < MAX_DEPTH && (found = ITEM.exec(line))) return new List(at, found, depth);
  return new Paragraph(at, depth);
}

const whole = (node, at) => ({ node, grow: () => at + 1 });

class Paragraph {
  constructor(at, depth) {
    this.at = at;
    this.depth = depth;
    this.node = el("p");
  }

  grow(lines) {
    let next = this.at + 1;
    while (next < lines.length && lines[next].trim() && !startsBlock(lines[next], this.depth) && !beginsTable(lines, next)) next++;
    const text = lines.slice(this.at, next).join("\n");
    if (text !== this.text) this.node.replaceChildren(...inline(text));
    this.text = text;
    return next;
  }
}

class Quote {
  constructor(at, depth) {
    this.next = at;
    this.lines = []; // of what is quoted
    this.numFinal = 0;
    this.node = el("blockquote");
    this.blocks = new Blocks(this.node, depth + 1);
  }

  grow(lines, numFinal, deadline) {
    this.lines.length = this.numFinal;
    let next = this.next;
    for (; next < lines.length && QUOTE.test(lines[next]); next++) {
      this.lines.push(lines[next].replace(QUOTE, ""));
      if (next < numFinal) [this.next, this.numFinal] = [next + 1, this.lines.length];
    }
    return this.blocks.show(this.lines, deadline) ? next : null;
  }
}

function startsBlock(line, depth) {
  const nests = depth < MAX_DEPTH && (QUOTE.test(line) || ITEM.test(line));
  return nests || FENCE.test(line) || HEADING.test(line) || RULE.test(line);
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

// A row with bars above a row of dashes with as many cells.
function beginsTable(lines, at) {
  return lines[at].includes("|") && DASHES.test(lines[at + 1] ?? "") && cells(lines[at]).length === cells(lines[at + 1]).length;
}

class Table {
  constructor(lines, at) {
    this.sides = cells(lines[at + 1]).map((dashes) => (dashes.endsWith(":") ? (dashes.startsWith(":") ? "middle" : "right") : null));
    this.next = at + 2;
    this.body = el("tbody");
    this.rest = []; // rows that may change
    this.node = el("div", { class: "table", tabindex: "0" }, el("table", {}, el("thead", {}, this.row(lines[at], "th")), this.body));
  }

  row(line, tag) {
    const given = cells(line);
    return el("tr", {}, ...this.sides.map((side, k) => el(tag, { class: side }, ...inline(given[k] ?? ""))));
  }

  grow(lines, numFinal, deadline) {
    removeAll(this.rest);
    let next = this.next;
    for (; next < lines.length && lines[next].trim() && !startsBlock(lines[next], 0); next++) {
      const row = this.row(lines[next], "td");
      this.body.append(row);
      if (next < numFinal) {
        this.next = next + 1;
        if (performance.now() > deadline) return null;
      } else this.rest.push(row);
    }
    return next;
  }
}

class Fence {
  constructor(at, [, mark, language]) {
    this.from = this.next = at + 1;
    this.mark = mark;
    const code = el("code");
    this.pieces = new Pieces(code, (text, isInComment) => highlight(text, language, isInComment));
    const head = el("div", { class: "code-head" }, el("span", {}, language || "text"), copyButton("Copy code", () => this.lines.slice(this.from, this.to).join("\n")));
    this.node = el("div", { class: "code" }, head, el("pre", { tabindex: "0" }, code));
  }

  closes(line) {
    return line.trim().startsWith(this.mark) && !line.trim().replaceAll(this.mark[0], "");
  }

  grow(lines, numFinal, deadline) {
    let to = this.next; // lines before it do not close the block
    while (to < lines.length && !this.closes(lines[to])) to++;
    this.next = Math.max(this.from, Math.min(to, numFinal));
    [this.lines, this.to] = [lines, to];
    if (!this.pieces.show(lines.slice(this.from, to), numFinal - this.from, deadline)) return null;
    return to < lines.length ? to + 1 : to;
  }
}

class List {
  constructor(at, [, , mark], depth) {
    this.isOrdered = /\d/.test(mark);
    this.depth = depth;
    this.next = at;
    this.item = null; // the last one that is kept
    this.rest = []; // items that may change
    this.node = el(this.isOrdered ? "ol" : "ul", this.isOrdered ? { start: parseInt(mark, 10) } : {});
  }

  grow(lines, numFinal, deadline) {
    removeAll(this.rest);
    let item = this.item;
    if (item) item.lines.length = item.numFinal;
    let next = this.next;
    for (; next < lines.length; next++) {
      const isFinal = next + 1 < numFinal; // a line and the one behind it
      if (item?.takes(lines, next)) item.add(lines[next]);
      else {
        const found = ITEM.exec(lines[next]);
        if (!found || /\d/.test(found[2]) !== this.isOrdered) break;
        if (item && !item.blocks.show(item.lines, deadline)) return null;
        item = new Item(lines[next], found[0].length, this.depth);
        this.node.append(item.node);
        if (!isFinal) this.rest.push(item.node);
      }
      if (isFinal) {
        [this.item, this.next, item.numFinal] = [item, next + 1, item.lines.length];
        if (performance.now() > deadline) return null;
      }
    }
    return !item || item.blocks.show(item.lines, deadline) ? next : null;
  }
}

class Item {
  constructor(line, indent, depth) {
    this.indent = indent;
    this.margin = new RegExp(`^ {0,${indent}}`);
    this.lines = [line.slice(indent)];
    this.numFinal = 0;
    this.node = el("li");
    this.blocks = new Blocks(this.node, depth + 1);
  }

  // A line that is blank belongs to the item if an indented one follows.
  takes(lines, at) {
    if (!lines[at].trim()) return /^ {2,}\S/.test(lines[at + 1] ?? "");
    return /^\s*/.exec(lines[at])[0].length >= Math.min(this.indent, 2);
  }

  add(line) {
    this.lines.push(line.replace(this.margin, ""));
  }
}

const LINK = /!?\[([^\[\]\n]{0,500})\]\(\s*<?([^\s()<>]{1,1500}(?:\([^\s()]{0,200}\))?)>?(?:\s+"[^"\n]{0,300}")?\s*\)/y;
const ADDRESS = /<?(https?:\/\/[^\s<>"'`]{1,1500})>?/y;

// Only http and https lead anywhere; images are links, since nothing is loaded from elsewhere.
function link(label, target) {
  let url;
  try {
    url = new URL(target);
  } catch {
    return null;
  }
  if (!["http:", "https:"].includes(url.protocol)) return null;
  return el("a", { href: url.href, rel: "noopener noreferrer nofollow ugc", target: "_blank" }, label || target);
}

function inline(text, depth = 0) {
  const nodes = [];
  const absent = new Set(); // marks that do not come again
  let plain = "";
  const add = (node) => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
    nodes.push(node);
  };
  for (let at = 0; at < text.length; ) {
    const [node, next] = span(text, at, depth, absent);
    if (node) add(node);
    else plain += text.slice(at, next).replace(/^\\(?=[!-\/:-@[-`{-~])/, "");
    at = next;
  }
  if (plain) nodes.push(document.createTextNode(plain));
  return nodes;
}

function span(text, at, depth, absent) {
  const char = text[at];
  const none = [null, at + 1];
  if (char === "\\") return [null, Math.min(at + 2, text.length)];
  if (char === "`" || ((char === "*" || char === "_" || char === "~") && depth < MAX_DEPTH)) return marked(text, at, depth, absent);
  if (char === "[" || (char === "!" && text[at + 1] === "[")) {
    LINK.lastIndex = at;
    const found = LINK.exec(text);
    const node = found && link(found[1], found[2]);
    return node ? [node, at + found[0].length] : none;
  }
  if (char === "h" || char === "<") {
    if (at && /\w/.test(text[at - 1])) return none;
    ADDRESS.lastIndex = at;
    const found = ADDRESS.exec(text);
    if (!found) return none;
    const target = char === "<" ? found[1] : found[1].replace(/[.,;:!?)*_]+$/, "");
    const node = link(target, target);
    return node ? [node, at + (char === "<" ? found[0].length : target.length)] : none;
  }
  return none;
}

const TAGS = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" };

function marked(text, at, depth, absent) {
  let end = at;
  while (text[end] === text[at]) end++;
  const mark = text[at] === "`" ? text.slice(at, end) : text.slice(at, Math.min(end, at + 2));
  const from = at + mark.length;
  const skip = [null, Math.max(end, from)];
  if (mark[0] !== "`" && !TAGS[mark]) return skip;
  if (mark[0] !== "`" && /\s/.test(text[from] ?? " ")) return skip;
  if (mark[0] === "_" && at && /\w/.test(text[at - 1])) return skip;
  if (absent.has(mark)) return skip;
  const close = text.indexOf(mark, from + (mark[0] === "`" ? 0 : 1));
  if (close < 0) {
    absent.add(mark);
    return skip;
  }
  if (close - from > MAX_LINK && mark[0] !== "`") return skip;
  const inner = text.slice(from, close);
  const node = mark[0] === "`" ? el("code", {}, inner) : el(TAGS[mark], {}, ...inline(inner, depth + 1));
  return [node, close + mark.length];
}
