// Shows Markdown that grows. Builds nodes, never HTML. Blocks that are complete stay as they are.

import { copyButton, el } from "./dom.js";
import { highlight } from "./highlight.js";

const MAX_DEPTH = 6;
const MAX_LINK = 2000;
const MAX_ITEMS = 50; // of a node: a longer list is several, so that what is complete need not be built again
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;
const QUOTE = /^ {0,3}> ?/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const DASHES = /^ {0,3}(?=.*\|)\|? *:?-+:? *(\| *:?-+:? *)*\|? *$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;

export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.text = "";
    this.stable = 0; // text before it is shown by nodes that stay
    this.num = 0; // those nodes
  }

  update(text) {
    if (!text.startsWith(this.text)) this.stable = this.num = 0;
    if (text === this.text && this.num) return;
    this.text = text;
    while (this.root.childNodes.length > this.num) this.root.lastChild.remove();
    const lines = text.slice(this.stable).split("\n");
    let offset = this.stable;
    let at = 0;
    while (at < lines.length) {
      const [node, next] = block(lines, at, 0);
      const size = lines.slice(at, next).reduce((sum, line) => sum + line.length + 1, 0);
      if (node) this.root.append(node);
      at = next;
      offset += size;
      if (at < lines.length - 1) {
        this.stable = offset;
        this.num = this.root.childNodes.length;
      }
    }
  }
}

function blocks(lines, depth) {
  const nodes = [];
  for (let at = 0; at < lines.length; ) {
    const [node, next] = block(lines, at, depth);
    if (node) nodes.push(node);
    at = next;
  }
  return nodes;
}

// The block that begins at a line, and the line behind it.
function block(lines, at, depth) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  let found;
  if ((found = FENCE.exec(line))) return fence(lines, at, found);
  if ((found = HEADING.exec(line))) return [el(`h${Math.min(found[1].length + 2, 6)}`, {}, ...inline(found[2])), at + 1];
  if (RULE.test(line)) return [el("hr"), at + 1];
  if (beginsTable(lines, at)) return table(lines, at);
  if (depth < MAX_DEPTH && QUOTE.test(line)) {
    let next = at;
    while (next < lines.length && QUOTE.test(lines[next])) next++;
    const inner = lines.slice(at, next).map((quoted) => quoted.replace(QUOTE, ""));
    return [el("blockquote", {}, ...blocks(inner, depth + 1)), next];
  }
  if (depth < MAX_DEPTH && (found = ITEM.exec(line))) return list(lines, at, found, depth);
  let next = at + 1;
  while (next < lines.length && lines[next].trim() && !startsBlock(lines[next], depth) && !beginsTable(lines, next)) next++;
  return [el("p", {}, ...inline(lines.slice(at, next).join("\n"))), next];
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

function table(lines, at) {
  const sides = cells(lines[at + 1]).map((dashes) => (dashes.endsWith(":") ? (dashes.startsWith(":") ? "middle" : "right") : null));
  const row = (line, tag) => {
    const given = cells(line);
    return el("tr", {}, ...sides.map((side, k) => el(tag, { class: side }, ...inline(given[k] ?? ""))));
  };
  let next = at + 2;
  while (next < lines.length && lines[next].trim() && !startsBlock(lines[next], 0)) next++;
  const body = lines.slice(at + 2, next).map((line) => row(line, "td"));
  const made = el("table", {}, el("thead", {}, row(lines[at], "th")), body.length ? el("tbody", {}, ...body) : null);
  return [el("div", { class: "table", tabindex: "0" }, made), next];
}

function fence(lines, at, [, mark, language]) {
  let next = at + 1;
  const closes = (line) => line.trim().startsWith(mark) && !line.trim().replaceAll(mark[0], "");
  while (next < lines.length && !closes(lines[next])) next++;
  const isClosed = next < lines.length;
  const text = lines.slice(at + 1, next).join("\n");
  const code = el("code", {}, ...(isClosed ? highlight(text, language) : [text]));
  const head = el("div", { class: "code-head" }, el("span", {}, language || "text"), copyButton("Copy code", () => text));
  return [el("div", { class: "code" }, head, el("pre", { tabindex: "0" }, code)), isClosed ? next + 1 : next];
}

function list(lines, at, first, depth) {
  const isOrdered = /\d/.test(first[2]);
  const items = [];
  let next = at;
  while (next < lines.length && items.length < MAX_ITEMS) {
    const found = ITEM.exec(lines[next]);
    if (!found || /\d/.test(found[2]) !== isOrdered) break;
    const indent = found[0].length;
    const inner = [lines[next].slice(indent)];
    next++;
    while (next < lines.length) {
      const isInside = /^\s*/.exec(lines[next])[0].length >= Math.min(indent, 2);
      const isBlank = !lines[next].trim();
      if (isBlank ? !/^ {2,}\S/.test(lines[next + 1] ?? "") : !isInside) break;
      inner.push(lines[next].replace(new RegExp(`^ {0,${indent}}`), ""));
      next++;
    }
    items.push(el("li", {}, ...blocks(inner, depth + 1)));
  }
  const start = isOrdered ? { start: parseInt(first[2], 10) } : {};
  return [el(isOrdered ? "ol" : "ul", start, ...items), next];
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
