// Reads formulas between $ and $, $$ and $$, \( and \), \[ and \]. Temml, which is loaded for the first formula,
// turns them into MathML. Until then, or if it cannot read a formula, the source is shown.

import { el } from "./dom.js";

const MAX = 5000; // characters of a formula
const MATHML = "http://www.w3.org/1998/Math/MathML";
const FORBIDDEN = /^(on|style$|href$|src$)/;

// Adds the rules to markdown-it.
export function readsMath(markdown) {
  const alt = ["paragraph", "reference", "blockquote", "list"];
  markdown.block.ruler.before("fence", "math", blockRule, { alt });
  markdown.inline.ruler.before("escape", "math", inlineRule);
}

const CLOSING = { $$: "$$", "\\[": "\\]", "\\(": "\\)", $: "$" };
const LINE_END = { $$: /\$\$\s*$/, "\\[": /\\\]\s*$/ };

function blockRule(state, from, end, isSilent) {
  const first = state.src.slice(state.bMarks[from] + state.tShift[from], state.eMarks[from]);
  const mark = first.slice(0, 2);
  if (!LINE_END[mark]) return false;
  let text = "";
  for (let line = from; line < end && (line === from || !state.isEmpty(line)); line++) {
    text += line === from ? first.slice(2) : `\n${state.getLines(line, line + 1, state.blkIndent, false)}`;
    if (!LINE_END[mark].test(text)) continue;
    if (isSilent) return true;
    const token = state.push("math", "", 0);
    Object.assign(token, { content: text.replace(LINE_END[mark], "").trim(), markup: "block", map: [from, line + 1] });
    state.line = line + 1;
    return true;
  }
  return false;
}

function inlineRule(state, isSilent) {
  const { src, pos } = state;
  if (src[pos] !== "$" && src[pos] !== "\\") return false;
  const two = src.slice(pos, pos + 2);
  const mark = CLOSING[two] ? two : src[pos];
  if (!CLOSING[mark]) return false;
  const begin = pos + mark.length;
  const close = closing(src, begin, mark);
  if (close < 0 || close > state.posMax) return false;
  if (!isSilent) {
    const token = state.push("math", "", 0);
    Object.assign(token, { content: src.slice(begin, close).trim(), markup: LINE_END[mark] ? "block" : "" });
  }
  state.pos = close + mark.length;
  return true;
}

// Returns where the formula ends, or -1. Prices are not formulas: text between two single $ has no space beside
// them, and no digit follows.
function closing(src, begin, mark) {
  const close = src.indexOf(CLOSING[mark], begin);
  const text = close < 0 ? "" : src.slice(begin, close);
  if (!text.trim() || text.length > MAX) return -1;
  if (mark === "$" && (/^\s|[\s\\]$|\n/.test(text) || /\d/.test(src[close + 1] ?? ""))) return -1;
  return close;
}

let library = null;
let asked = null;
const waiting = new Set();

export function mathNode(source, isBlock) {
  const node = el("span", { class: isBlock ? "math block" : "math", tabindex: isBlock ? "0" : null }, source);
  if (library) fill(node, source, isBlock);
  else waiting.add([node, source, isBlock]);
  asked ??= library ?? load();
  return node;
}

async function load() {
  try {
    library = (await import("./vendor/temml.js")).default;
    for (const one of waiting) fill(...one);
    waiting.clear();
  } catch {
    // The next formula tries again.
    asked = null;
  }
}

function fill(node, source, isBlock) {
  try {
    if (source.length > MAX) return;
    const options = { displayMode: isBlock, throwOnError: true, trust: false, maxSize: [20, 20], maxExpand: 200 };
    node.replaceChildren(nodeOf(library.__renderToMathMLTree(source, options)));
  } catch {
    node.classList.add("raw");
  }
}

function nodeOf({ text, type, attributes, classes, style, children }) {
  if (text !== undefined) return document.createTextNode(text);
  if (!type) return wrap(document.createDocumentFragment(), children);
  const node = document.createElementNS(MATHML, type);
  for (const [name, value] of Object.entries(attributes)) if (!FORBIDDEN.test(name)) node.setAttribute(name, value);
  if (classes.length) node.setAttribute("class", classes.filter(Boolean).join(" "));
  // The security policy forbids style attributes, but not this.
  for (const [name, value] of Object.entries(style)) node.style[name] = value;
  return wrap(node, children);
}

function wrap(node, children) {
  node.append(...children.map(nodeOf));
  return node;
}
