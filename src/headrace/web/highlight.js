// Colours strings, comments, numbers and keywords, alike in all languages.

import { el } from "./dom.js";

const MAX = 20_000; // characters: lines so long would hold up the page
const HASHED = new Set(["py", "python", "sh", "bash", "zsh", "ruby", "rb", "yaml", "yml", "toml", "r", "perl", "make"]);
const WORDS = new Set(
  ("abstract and as assert async await begin bool break case catch char class const continue def default defer del do done double " +
    "elif else end enum except export extends false final finally float fn for from func function global go if impl implements " +
    "import in int interface is lambda let long loop match mod module mut namespace new nil None not null of or package pass " +
    "private protected pub public raise return select self SELECT FROM WHERE static struct super switch then this throw trait " +
    "true True False try type typedef undefined union unsafe use using var void while with yield").split(" "),
);

// The nodes of some whole lines, and whether they end within a comment; `isInComment`: so did the
// lines before them.
export function highlight(text, language, isInComment) {
  if (!language || language === "text" || text.length > MAX) return [[text], false];
  const comment = HASHED.has(language) ? "#[^\\n]*" : "\\/\\/[^\\n]*|\\/\\*[^]*?(?:\\*\\/|$)";
  const pattern = new RegExp(`(${comment})|("(?:\\\\.|[^"\\\\\\n])*"?|'(?:\\\\.|[^'\\\\\\n])*'?)|(\\b\\d[\\w.]*)|([A-Za-z_]\\w*)`, "g");
  const nodes = [];
  const isOpen = (found) => found.startsWith("/*") && !(found.length > 3 && found.endsWith("*/"));
  let at = 0;
  if (isInComment) {
    const end = text.indexOf("*/");
    at = pattern.lastIndex = end < 0 ? text.length : end + 2;
    nodes.push(el("span", { class: "hl-comment" }, text.slice(0, at)));
    if (end < 0) return [nodes, true];
  }
  isInComment = false;
  for (const found of text.matchAll(pattern)) {
    const kind = found[1] ? "comment" : found[2] ? "string" : found[3] ? "number" : WORDS.has(found[4]) ? "word" : "";
    if (!kind) continue;
    nodes.push(text.slice(at, found.index), el("span", { class: `hl-${kind}` }, found[0]));
    at = found.index + found[0].length;
    isInComment = kind === "comment" && isOpen(found[0]);
  }
  nodes.push(text.slice(at));
  return [nodes, isInComment];
}
