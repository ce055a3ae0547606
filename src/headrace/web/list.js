// The list of conversations, grouped by the day of their last message.

import { button, el } from "./dom.js";
import { icon } from "./icons.js";
import { openMenu } from "./menu.js";
import { renameIn } from "./rename.js";
import { marked } from "./search.js";
import * as store from "./store.js";

const DAY_MS = 86_400_000;
const MONTH = new Intl.DateTimeFormat("en", { month: "long", year: "numeric" });

// Returns the name of the group that a time belongs to.
export function groupOf(time, now = Date.now()) {
  const midnight = new Date(now).setHours(0, 0, 0, 0);
  const daysAgo = Math.ceil((midnight - time) / DAY_MS);
  if (daysAgo <= 0) return "Today";
  if (daysAgo === 1) return "Yesterday";
  if (daysAgo <= 7) return "Last 7 days";
  return daysAgo <= 30 ? "Last 30 days" : MONTH.format(time);
}

export class ConversationList {
  // `acts` has open and rename, and items, which returns the rest of a row's menu. Each takes a conversation.
  constructor(root, acts) {
    this.root = root;
    this.acts = acts;
    // By id. An entry is kept as long as its conversation exists.
    this.entries = new Map();
    // By the name of the group.
    this.sections = new Map();
    // The conversations that match the search, by id; null without a search.
    this.found = null;
    root.addEventListener("keydown", (event) => this.move(event));
  }

  // `isLive` takes an id, and returns whether an answer is being generated there.
  async show(current, isLive) {
    const all = (await store.conversations()).sort((a, b) => b.updated - a.updated);
    const known = this.entries;
    this.entries = new Map(all.map(({ id }) => [id, known.get(id) ?? new Entry(id, this.acts)]));
    const groups = new Map();
    for (const one of all) {
      const entry = this.entries.get(one.id);
      entry.show(one, { isCurrent: one.id === current, isLive: isLive(one.id), piece: this.found?.get(one.id)?.piece });
      if (this.found && !this.found.has(one.id)) continue;
      const name = groupOf(one.updated);
      if (!groups.has(name)) groups.set(name, []);
      groups.get(name).push(entry.node);
    }
    fill(this.root, [...groups].map(([name, nodes]) => this.section(name, nodes)));
    if (!groups.size) this.root.replaceChildren(el("p", { class: "soft" }, this.found ? "No conversation contains these words." : "Your conversations appear here. They stay in this browser."));
  }

  section(name, nodes) {
    if (!this.sections.has(name)) this.sections.set(name, el("section", {}, el("h3", {}, name), el("ul", { "aria-label": name })));
    const section = this.sections.get(name);
    fill(section.lastChild, nodes);
    return section;
  }

  rename(id) {
    this.entries.get(id).rename();
  }

  // Moves the focus up and down the rows, and from the first row up to the search.
  move(event) {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!by || !event.target.matches("button")) return;
    event.preventDefault();
    const rows = [...this.root.querySelectorAll("li .open")];
    const at = rows.indexOf(event.target.closest("li").querySelector(".open")) + by;
    (rows[at] ?? (at < 0 ? document.getElementById("search") : null))?.focus();
  }

  focusFirst() {
    this.root.querySelector("li .open")?.focus();
  }
}

// Sets the children of a node, and does not move a child that is in its place already.
function fill(parent, children) {
  children.forEach((child, k) => parent.children[k] !== child && parent.insertBefore(child, parent.children[k] ?? null));
  while (parent.children.length > children.length) parent.lastChild.remove();
}

class Entry {
  constructor(id, acts) {
    this.acts = acts;
    this.open = button("", () => acts.open(id), { class: "open" });
    this.more = button(icon("more"), () => openMenu(this.more, [["edit", "Rename", () => this.rename()], ...acts.items(this.conversation)]), { class: "more", "aria-haspopup": "menu" });
    this.node = el("li", {}, this.open, this.more);
  }

  show(conversation, { isCurrent, isLive, piece }) {
    this.conversation = conversation;
    const { title } = conversation;
    const state = JSON.stringify([title, isCurrent, isLive, piece]);
    if (this.state === state) return;
    this.state = state;
    const mark = isLive ? el("span", { class: "mark", role: "img", "aria-label": "answer in progress" }) : null;
    this.open.replaceChildren(...[el("span", { class: "name" }, title), mark, piece ? marked(piece) : null].filter(Boolean));
    this.open.title = title;
    this.more.setAttribute("aria-label", `Menu of ${title}`);
    if (isCurrent) this.open.setAttribute("aria-current", "true");
    else this.open.removeAttribute("aria-current");
  }

  rename() {
    renameIn(this.open, this.conversation.title, (name) => this.acts.rename(this.conversation, name));
  }
}
