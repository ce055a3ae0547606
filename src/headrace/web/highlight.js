// Colours code. highlight.js parses it, and its tree becomes nodes, never HTML.

import { el } from "./dom.js";
import library from "./vendor/highlight.js";

const MAX = 20_000; // characters; more would hold up the page

// Returns the nodes of some whole lines, and whether no comment or string is still open at their end.
export function highlight(text, language) {
  if (text.length > MAX || !library.getLanguage(language)) return [[text], true];
  const { _emitter: tree, _top: mode } = library.highlight(text, { language, ignoreIllegals: true });
  return [tree.rootNode.children.map(nodeOf), !mode.parent];
}

function nodeOf(part) {
  if (typeof part === "string") return part;
  const [kind] = (part.scope ?? "").split(".");
  return el("span", { class: kind && !kind.includes(":") && `hl-${kind}` }, ...part.children.map(nodeOf));
}
