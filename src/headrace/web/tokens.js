// Splits a Markdown text into parts, and builds their nodes.

import { Code } from "./code.js";
import { button, el } from "./dom.js";
import { mathNode, readsMath } from "./math.js";
import footnote from "./vendor/markdown-it-footnote.js";
import MarkdownIt from "./vendor/markdown-it.js";

const markdown = new MarkdownIt({ html: false, linkify: true }).use(footnote).use(readsMath);
markdown.inline.ruler.disable("footnote_inline");
markdown.validateLink = (target) => /^https?:\/\/./i.test(target) && URL.canParse(target);

// Returns the parts as {type, key, from, to, tokens, env}, with lines from `from` to `to`. Parts with the same key
// look the same.
function partsOf(tokens, level, lines, env) {
  const parts = [];
  const known = `${Object.keys(env.references ?? {}).length} `;
  let at = 0;
  for (const [k, token] of tokens.entries()) {
    if (token.level !== level || token.nesting > 0) continue;
    const own = tokens.slice(at, k + 1);
    at = k + 1;
    // A footnote has no map of its own.
    const maps = own.map(({ map }) => map).filter(Boolean);
    const [from, to] = [maps[0]?.[0] ?? 0, Math.max(0, ...maps.map(([, end]) => end))];
    parts.push({ type: own[0].type, key: known + own[0].type + lines.slice(from, to).join("\n"), from, to, tokens: own, env });
  }
  return parts;
}

function read(lines) {
  const env = { footnotes: { refs: new Proxy({}, numbered) } };
  const tokens = [];
  markdown.block.parse(lines.join("\n"), markdown, env, tokens);
  return partsOf(tokens, 0, lines, env).map(dressed);
}

// A reference with a number counts as a footnote, since the footnote's text comes later.
const numbered = { get: (known, name) => (/^:\d{1,3}$/.test(name) ? -1 : known[name]) };

function dressed(part) {
  const [first] = part.tokens;
  const more = { markup: first.markup, start: first.attrGet("start") };
  return { ...part, ...more, ...(part.type === "fence" ? { language: languageOf(first), text: first.content } : {}) };
}

const languageOf = ({ info }) => info.trim().split(/\s/)[0];

export function blocksOf(lines) {
  return { parts: read(lines), to: lines.length };
}

// Returns the parts within the first block, if `isIt` accepts that block; else none.
function inner(lines, isIt, parts) {
  const [block, after] = read(lines);
  if (!block) return { parts: [], to: lines.length };
  if (!isIt(block)) return { parts: [], to: 0 };
  return { parts: parts(block), to: after ? after.from : lines.length };
}

// Returns a reader of the items of a list like this one.
export function itemsOf({ type, markup }) {
  const isIt = (block) => block.type === type && block.markup === markup;
  return (lines) => inner(lines, isIt, ({ tokens, env }) => partsOf(tokens.slice(1, -1), 1, lines, env));
}

// Returns a reader of the rows below the two lines that begin a table.
export function rowsOf(head) {
  return (lines) => {
    const all = [...head, ...lines];
    const rows = ({ tokens, env }) => {
      const body = tokens.findIndex(({ type }) => type === "tbody_open");
      const found = body < 0 ? [] : partsOf(tokens.slice(body + 1, -2), 2, all, env);
      return found.map((row) => ({ ...row, from: row.from - 2, to: row.to - 2 }));
    };
    const { parts, to } = inner(all, ({ type }) => type === "table_open", rows);
    return { parts, to: Math.max(0, to - 2) };
  };
}

// Returns the lines of a long paragraph as parts.
export function linesOf(lines) {
  const isIt = ({ type, from }) => type === "paragraph_open" && !from;
  return inner(lines, isIt, ({ to, env }) =>
    lines.slice(0, to).map((content, from) => ({ type: "line", key: content, from, to: from + 1, tokens: [{ type: "inline", nesting: 0, content: `${content}\n` }], env })),
  );
}

const TAGS = {
  paragraph_open: "p", bullet_list_open: "ul", ordered_list_open: "ol", list_item_open: "li", blockquote_open: "blockquote",
  thead_open: "thead", tbody_open: "tbody", tr_open: "tr", th_open: "th", td_open: "td", em_open: "em", strong_open: "strong", s_open: "del", hr: "hr",
};
const SIDES = { "text-align:right": "right", "text-align:center": "middle" };
const TASK = /^\[([ xX])\] +/;

export function nodeOf({ type, tokens, env }) {
  const made = document.createDocumentFragment();
  build(tokens, env, made);
  return type === "line" ? el("span", {}, made) : made.firstChild;
}

// Appends the nodes of tokens.
function build(tokens, env, root) {
  const path = [root];
  for (const token of tokens) {
    const top = path.at(-1);
    if (token.type === "inline") buildText(token, env, top);
    else if (token.nesting < 0) path.pop();
    else {
      const [node, inner = node] = make(token);
      top.append(node);
      if (token.nesting > 0) path.push(inner);
    }
  }
}

function buildText({ content }, env, top) {
  const [mark, done] = (top.parentNode?.localName === "li" && top.parentNode.firstChild === top && TASK.exec(content)) || [""];
  if (mark) {
    top.parentNode.classList.add("task");
    top.append(el("input", { type: "checkbox", disabled: true, checked: done !== " ", "aria-label": done === " " ? "to do" : "done" }), " ");
  }
  const tokens = [];
  markdown.inline.parse(content.slice(mark.length), markdown, env, tokens);
  build(tokens, env, top);
}

// Returns the node of a token, and the node for its contents if that is another one.
function make(token) {
  const tag = TAGS[token.type];
  if (tag) return [el(tag, { start: token.attrGet("start"), class: SIDES[token.attrGet("style")] })];
  return (MAKERS[token.type] ?? textOf)(token);
}

const textOf = ({ content }) => [document.createTextNode(content)];

// Images become links, since nothing is loaded from other hosts.
const link = (target, text = "") => [el("a", { href: target, rel: "noopener noreferrer nofollow ugc", target: "_blank" }, text)];

const MAKERS = {
  heading_open: ({ tag }) => [el(`h${Math.min(Number(tag[1]) + 2, 6)}`)],
  table_open() {
    const table = el("table");
    return [el("div", { class: "table", tabindex: "0" }, table), table];
  },
  fence: (token) => codeOf(token, languageOf(token)),
  code_block: (token) => codeOf(token, ""),
  softbreak: () => ["\n"],
  hardbreak: () => ["\n"],
  code_inline: ({ content }) => [el("code", {}, content)],
  link_open: (token) => link(token.attrGet("href")),
  image: (token) => link(token.attrGet("src"), token.content || token.attrGet("src")),
  math: ({ content, markup }) => [mathNode(content, markup === "block")],
  footnote_ref: ({ meta }) => [el("sup", {}, button(meta.label, goToNote, { class: "to-note", "data-note": meta.label, "aria-label": `Footnote ${meta.label}` }))],
  footnote_reference_open({ meta }) {
    const text = el("div");
    return [el("div", { class: "note", tabindex: "-1", "data-note": meta.label }, el("span", {}, meta.label), text), text];
  },
};

function codeOf({ content }, language) {
  const lines = content.replace(/\n$/, "").split("\n");
  const code = new Code(language);
  code.show(lines, lines.length, Infinity);
  return [code.node];
}

function goToNote({ currentTarget }) {
  const notes = [...currentTarget.closest(".body").querySelectorAll(".note")];
  notes.find(({ dataset }) => dataset.note === currentTarget.dataset.note)?.focus();
}
