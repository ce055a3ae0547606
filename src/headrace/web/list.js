// The list of conversations, and the search in it.

import { button, el } from "./dom.js";
import * as store from "./store.js";

export class ConversationList {
  // `open` is called with the id of the conversation that was chosen.
  constructor(root, open) {
    this.root = root;
    this.open = open;
    this.entries = new Map(); // by id; each stays as long as its conversation
    this.found = null; // ids that match the search; null: all
    this.numSearches = 0;
  }

  // `isLive` says of an id whether an answer is coming there.
  async show(current, isLive) {
    const all = (await store.conversations()).sort((a, b) => b.updated - a.updated);
    const known = this.entries;
    this.entries = new Map(all.map(({ id }) => [id, known.get(id) ?? this.entry(id)]));
    for (const one of all) this.fill(this.entries.get(one.id), one.title, one.id === current, isLive(one.id));
    const shown = all.filter(({ id }) => !this.found || this.found.has(id)).map(({ id }) => this.entries.get(id));
    shown.forEach((entry, k) => this.root.children[k] !== entry && this.root.insertBefore(entry, this.root.children[k] ?? null));
    while (this.root.children.length > shown.length) this.root.lastChild.remove();
  }

  entry(id) {
    return el("li", {}, button("", () => this.open(id)));
  }

  fill(entry, title, isCurrent, isLive) {
    const state = JSON.stringify([title, isCurrent, isLive]);
    if (entry.dataset.state === state) return;
    entry.dataset.state = state;
    const mark = isLive ? [el("span", { class: "mark", role: "img", "aria-label": "answer is coming" })] : [];
    const open = entry.firstChild;
    open.replaceChildren(title, ...mark);
    if (isCurrent) open.setAttribute("aria-current", "true");
    else open.removeAttribute("aria-current");
  }

  // Finds what has the words in its title or in a message. Says whether it was not overtaken by
  // the next search.
  async search(words) {
    const number = ++this.numSearches;
    const isLast = () => number === this.numSearches;
    const wanted = words.trim().toLowerCase();
    const matches = (text) => text.toLowerCase().includes(wanted);
    const found = wanted ? new Set() : null;
    if (wanted) {
      for (const { id, title } of await store.conversations()) if (matches(title)) found.add(id);
      await store.readMessages((some) => {
        for (const { conversation, text } of some) if (!found.has(conversation) && matches(text)) found.add(conversation);
        return isLast();
      });
    }
    if (isLast()) this.found = found;
    return isLast();
  }
}
