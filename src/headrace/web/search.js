// Searches titles and messages, and marks the words in the conversation.

import { el } from "./dom.js";
import * as store from "./store.js";

const NUM_AROUND = 40; // characters shown on each side of the words
const MOST_MARKS = 1000;
let numSearches = 0;

// Returns for each conversation the first message with the words, and the text around them; both are null if the
// words are in the title. Returns null without words, and undefined if a later search has begun.
export async function search(words) {
  const number = ++numSearches;
  const wanted = words.trim().toLowerCase();
  const isLast = () => number === numSearches;
  if (!wanted) return null;
  const found = new Map();
  for (const { id, title } of await store.conversations()) if (title.toLowerCase().includes(wanted)) found.set(id, { message: null, piece: null });
  await store.readMessages((some) => {
    for (const { id, conversation, text } of some) {
      if (found.get(conversation)?.message) continue;
      const at = text.toLowerCase().indexOf(wanted);
      if (at >= 0) found.set(conversation, { message: id, piece: pieceAround(text, at, wanted.length) });
    }
    return isLast();
  });
  return isLast() ? found : undefined;
}

function pieceAround(text, at, length) {
  const line = (from, to) => text.slice(Math.max(0, from), to).replace(/\s+/g, " ");
  return [(at > NUM_AROUND ? "…" : "") + line(at - NUM_AROUND, at), line(at, at + length), line(at + length, at + length + NUM_AROUND)];
}

export const marked = ([before, place, after]) => el("span", { class: "piece-found" }, before, el("mark", {}, place), after);

// Marks the words below a node, and returns the first place as a range.
export function markIn(root, words) {
  const wanted = words.trim().toLowerCase();
  const ranges = [];
  const nodes = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (wanted && nodes.nextNode() && ranges.length < MOST_MARKS) {
    const text = nodes.currentNode.data.toLowerCase();
    for (let at = text.indexOf(wanted); at >= 0; at = text.indexOf(wanted, at + wanted.length)) {
      const range = new Range();
      range.setStart(nodes.currentNode, at);
      range.setEnd(nodes.currentNode, at + wanted.length);
      ranges.push(range);
    }
  }
  if (ranges.length) CSS.highlights?.set("found", new Highlight(...ranges));
  else CSS.highlights?.delete("found");
  return ranges[0];
}
