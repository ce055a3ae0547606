// Colours strings, comments, numbers and keywords, alike in all languages.

import { el } from "./dom.js";

const MAX = 20_000; // more would hold up the page
const HASHED = new Set(["py", "python", "sh", "bash", "zsh", "ruby", "rb", "yaml", "yml", "toml", "r", "perl", "make"]);
const WORDS = new Set(
  ("abstract and as assert async await begin bool break case catch char class const continue def default defer del do done double " +
    "elif else end enum except export extends false final finally float fn for from func function global go if impl implements " +
    "import in int interface is lambda let long loop match mod module mut namespace new nil None not null of or package pass " +
    "private protected pub public raise return select self SELECT FROM WHERE static struct super switch then this throw trait " +
    "true True False try type typedef undefined union unsafe use using var void while with yield").split(" "),
);

export function highlight(text, language) {
  if (!language || language === "text" || text.length > MAX) return [text];
  const comment = HASHED.has(language) ? "#[^\\n]*" : "\\/\\/[^\\n]*|\\/\\*[^]*?(?:\\*\\/|$)";
  const pattern = new RegExp(`(${comment})|("(?:\\\\.|[^"\\\\\\n])*"?|'(?:\\\\.|[^'\\\\\\n])*'?)|(\\b\\d[\\w.]*)|([A-Za-z_]\\w*)`, "g");
  const nodes = [];
  let at = 0;
  for (const found of text.matchAll(pattern)) {
    const kind = found[1] ? "comment" : found[2] ? "string" : found[3] ? "number" : WORDS.has(found[4]) ? "word" : "";
    if (!kind) continue;
    nodes.push(text.slice(at, found.index), el("span", { class: `hl-${kind}` }, found[0]));
    at = found.index + found[0].length;
  }
  nodes.push(text.slice(at));
  return nodes;
}
