// Conversations as a file: written for the person, and read with suspicion.

import { el, newId } from "./dom.js";
import { isImage } from "./images.js";
import { choicesOf } from "./settings.js";
import * as store from "./store.js";

export async function exportAll() {
  const kept = ({ body, key, live, stream, cursor, ...rest }) => rest;
  const messages = [];
  await store.readMessages((some) => void messages.push(...some.map((one) => JSON.stringify(kept(one)))));
  const head = JSON.stringify({ format: "headrace-conversations-1", conversations: await store.conversations() });
  const whole = new Blob([`${head.slice(0, -1)},"messages":[`, messages.join(), "]}"], { type: "application/json" });
  const link = el("a", { href: URL.createObjectURL(whole), download: "conversations.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

const text = (value) => (typeof value === "string" ? value : "");
const number = (value) => (Number.isFinite(value) ? value : 0);
const list = (value) => (Array.isArray(value) ? value : []);
const roleOf = (value) => (["user", "tool"].includes(value) ? value : "assistant");

// What is here already is known by its id, and merged. Throws where it is no such file.
export async function importAll(file) {
  const whole = JSON.parse(await file.text());
  const ids = new Map(); // new ones, where the old ones could not stand in a header or an address
  const fresh = (old) => ids.get(old) ?? ids.set(old, newId()).get(old);
  const id = (old) => (typeof old !== "string" ? null : /^[\w-]{1,64}$/.test(old) ? old : fresh(old));
  const conversations = whole.conversations.map((one) => ({
    id: id(one.id), title: text(one.title).slice(0, 200) || "Imported", created: number(one.created), updated: number(one.updated), leaf: id(one.leaf),
    ...(one.choices ? { choices: choicesOf(one.choices) } : {}),
  }));
  const messages = whole.messages.map((one) => ({
    id: id(one.id), conversation: id(one.conversation), parent: id(one.parent), role: roleOf(one.role),
    text: text(one.text), reasoning: text(one.reasoning), created: number(one.created), outcome: "done",
    images: list(one.images).filter(isImage),
    calls: list(one.calls).map((call) => ({ id: text(call.id), name: text(call.name), arguments: text(call.arguments) })),
    results: list(one.results).map((result) => ({ id: text(result.id), name: text(result.name), text: text(result.text) })),
  }));
  await store.merge({ conversations, messages });
}
