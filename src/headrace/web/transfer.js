// Exports conversations as files, and imports them without trusting their contents.

import { el, newId } from "./dom.js";
import { asText, fenced } from "./files.js";
import { isImage } from "./images.js";
import { choicesOf } from "./settings.js";
import * as store from "./store.js";

const FORMAT = "headrace-conversations-1";
const kept = ({ body, key, live, stream, cursor, ...rest }) => rest;

export async function exportAll() {
  const messages = [];
  await store.readMessages((some) => void messages.push(...some.map((one) => JSON.stringify(kept(one)))));
  const head = JSON.stringify({ format: FORMAT, conversations: await store.conversations() });
  save("conversations.json", [`${head.slice(0, -1)},"messages":[`, messages.join(), "]}"]);
}

export async function exportJson(conversation) {
  const messages = (await store.messagesOf(conversation.id)).map(kept);
  save(`${fileName(conversation)}.json`, [JSON.stringify({ format: FORMAT, conversations: [conversation], messages })]);
}

// Saves the branch in view as a text for people.
export async function exportMarkdown(conversation) {
  const messages = new Map((await store.messagesOf(conversation.id)).map((one) => [one.id, one]));
  const parts = [];
  for (let at = messages.get(conversation.leaf); at; at = messages.get(at.parent)) parts.unshift(...asMarkdown(at));
  save(`${fileName(conversation)}.md`, [`# ${conversation.title}\n\n`, parts.join("\n\n"), "\n"]);
}

function asMarkdown({ role, text, calls, results, files, model }) {
  const who = { user: "You", tool: "Tool results" }[role] ?? (model || "Answer");
  const made = [...(calls ?? []).map((call) => [call.name, call.arguments]), ...(results ?? []).map((result) => [`Result of ${result.name}`, result.text])];
  const blocks = made.map(([name, what]) => `${name}:\n\n${fenced(what)}`);
  return [`## ${who}`, ...(files ?? []).map(asText), ...(role === "tool" || !text ? [] : [text]), ...blocks];
}

const fileName = ({ title }) => title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60).toLowerCase() || "conversation";

function save(name, parts) {
  const link = el("a", { href: URL.createObjectURL(new Blob(parts, { type: "application/octet-stream" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

const text = (value) => (typeof value === "string" ? value : "");
const number = (value) => (Number.isFinite(value) && value >= 0 ? value : 0);
const list = (value) => (Array.isArray(value) ? value : []);
const roleOf = (value) => (["user", "tool"].includes(value) ? value : "assistant");

// Imports a file; throws if it is not an export. What is here already is found by its id, and merged. Returns a
// text that says what was imported.
export async function importAll(file) {
  const whole = JSON.parse(await file.text());
  // New ids for those that could not be part of a header or a URL.
  const ids = new Map();
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
    files: list(one.files).map((file) => ({ name: text(file.name), text: text(file.text), size: number(file.size), ...(file.pages ? { pages: number(file.pages) } : {}) })),
    calls: list(one.calls).map((call) => ({ id: text(call.id), name: text(call.name), arguments: text(call.arguments) })),
    results: list(one.results).map((result) => ({ id: text(result.id), name: text(result.name), text: text(result.text) })),
  }));
  const { numAdded, numChanged } = await store.merge({ conversations, messages });
  const numKnown = conversations.length - numAdded - numChanged;
  const told = [[numAdded, "new"], [numChanged, "updated"], [numKnown, "already here"]].filter(([number]) => number > 0);
  return `Imported: ${told.map((one) => one.join(" ")).join(", ") || "nothing"}.`;
}
