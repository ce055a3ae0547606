// The chat: which conversation is in view, what is sent, and a follower for each answer due.

import { ask, errorOf } from "./api.js";
import { button, el, newId } from "./dom.js";
import { Follower } from "./follow.js";
import { MessageView } from "./message.js";
import { NUMBERS, sampling, saveSettings, settings } from "./settings.js";
import * as store from "./store.js";

const $ = (id) => document.getElementById(id);
const followers = new Map(); // by message id
let current = null; // the conversation in view
let messages = new Map(); // its messages
let views = new Map();
let found = null; // ids that match the search; null: all

// what is in view

function path() {
  const shown = [];
  for (let at = messages.get(current?.leaf); at; at = messages.get(at.parent)) shown.unshift(at);
  return shown;
}

function siblings(message) {
  return [...messages.values()].filter((other) => other.parent === message.parent).sort((a, b) => a.created - b.created);
}

const acts = {
  place(message) {
    const all = siblings(message);
    return [all.indexOf(message), all];
  },
  async branch(message) {
    let leaf = message;
    for (;;) {
      const next = [...messages.values()].filter((other) => other.parent === leaf.id).sort((a, b) => b.created - a.created)[0];
      if (!next) break;
      leaf = next;
    }
    current.leaf = leaf.id;
    await store.saveConversation(current);
    showThread();
  },
  async edit(message) {
    const text = await question("Edit the message", message.text);
    if (text) await send(text, message.parent);
  },
  regenerate: (message) => answer([], message.parent),
};

function showThread() {
  const thread = $("thread");
  views = new Map();
  thread.replaceChildren(...path().map((message) => {
    const view = new MessageView(message, acts);
    views.set(message.id, view);
    view.show(followers.get(message.id));
    return view.node;
  }));
  if (!views.size) thread.append(el("p", { class: "hint" }, "Ask something. You may close this page at any time: the answer goes on, and you find it here."));
  $("title").textContent = current?.title ?? "New conversation";
  document.title = current ? `${current.title} · Headrace` : "Headrace";
  $("rename").hidden = $("delete").hidden = !current;
  thread.scrollTop = thread.scrollHeight;
  showButtons();
}

function showButtons() {
  const isLive = path().some((message) => message.live);
  $("stop").hidden = !isLive;
  $("send").hidden = isLive;
}

async function showList() {
  const all = (await store.conversations()).sort((a, b) => b.updated - a.updated);
  const live = new Set([...followers.values()].map((one) => one.answer.conversation));
  $("list").replaceChildren(...all.filter((one) => !found || found.has(one.id)).map((one) => {
    const mark = live.has(one.id) ? el("span", { class: "mark", role: "img", "aria-label": "answer is coming" }) : null;
    const open = button("", () => show(one.id), { "aria-current": one.id === current?.id ? "true" : null });
    open.append(one.title, ...(mark ? [mark] : []));
    return el("li", {}, open);
  }));
}

async function show(id) {
  current = id ? (await store.conversation(id)) ?? null : null;
  messages = new Map((current ? await store.messagesOf(id) : []).map((one) => [one.id, followers.get(one.id)?.answer ?? one]));
  location.hash = current ? current.id : "";
  document.body.classList.remove("with-side");
  showThread();
  await showList();
  await followLive();
}

// answers

const inView = (answer) => answer.conversation === current?.id;

function follow(message) {
  if (followers.has(message.id)) return;
  const follower = new Follower(message, changed, () => inView(message));
  followers.set(message.id, follower);
  follower.run().catch((error) => console.error(error)).finally(() => {
    followers.delete(message.id);
    if (inView(message)) $("news").textContent = message.outcome === "done" ? "The answer is complete." : "The answer has ended.";
    changed(follower);
    showList();
  });
  showList();
}

async function followLive() {
  for (const message of await store.liveMessages()) {
    follow(messages.get(message.id)?.live ? messages.get(message.id) : message);
  }
}

const due = new Set();

// At most once a frame; seldom while the page is hidden, when there are none.
function changed(follower) {
  if (!due.size) (document.hidden ? (act) => setTimeout(act, 200) : requestAnimationFrame)(paint);
  due.add(follower);
}

function paint() {
  const thread = $("thread");
  const isAtEnd = thread.scrollHeight - thread.scrollTop - thread.clientHeight < 80;
  for (const follower of due) if (inView(follower.answer)) views.get(follower.answer.id)?.show(follower);
  due.clear();
  if (isAtEnd) thread.scrollTop = thread.scrollHeight;
  showButtons();
}

function history(leaf) {
  const turns = [];
  for (let at = leaf; at; at = messages.get(at.parent)) turns.unshift(at);
  const system = settings().system.trim();
  return [
    ...(system ? [{ role: "system", content: system }] : []),
    ...turns.map(({ role, text, calls }) => ({
      role,
      content: text,
      ...(calls.length ? { tool_calls: calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } })) } : {}),
    })),
  ];
}

function newMessage(role, text, parent) {
  return { id: newId(), conversation: current.id, parent: parent ?? null, role, text, reasoning: "", calls: [], created: Date.now() };
}

async function send(text, parent) {
  if (!current) current = { id: newId(), title: text.trim().slice(0, 60), created: Date.now() };
  const asked = newMessage("user", text, parent);
  messages.set(asked.id, asked);
  await answer([asked], asked.id);
}

// The answer is on the disk, with the bytes and the key of its POST, before that is sent.
async function answer(before, parent) {
  const due = newMessage("assistant", "", parent);
  due.created += 1;
  const fields = { messages: history(messages.get(parent)), stream: true, return_progress: true, timings_per_token: true };
  Object.assign(due, { live: 1, stream: null, cursor: "", key: newId(), body: JSON.stringify({ ...fields, ...sampling() }) });
  messages.set(due.id, due);
  Object.assign(current, { leaf: due.id, updated: Date.now() });
  await store.saveTurn(current, [...before, due]);
  location.hash = current.id;
  showThread();
  follow(due);
  $("news").textContent = "Sent.";
}

async function remove() {
  if (!(await question(`Delete “${current.title}”?`))) return;
  const id = current.id;
  for (const { stream, id: message } of messages.values()) {
    followers.get(message)?.close();
    if (stream) ask(`/v1/streams/${encodeURIComponent(stream)}`, { method: "DELETE" }).catch(() => {});
  }
  await store.removeConversation(id);
  await show(null);
}

// dialogs

function question(text, value) {
  const dialog = $("asking");
  $("question").textContent = text;
  $("reply").hidden = value === undefined;
  $("reply").value = value ?? "";
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.onclose = () => resolve(dialog.returnValue === "yes" ? (value === undefined ? true : $("reply").value.trim()) : null);
  });
}

function openSettings() {
  const form = $("choices").querySelector("form");
  const chosen = settings();
  $("numbers").replaceChildren(...NUMBERS.map((name) => el("label", {}, name.replaceAll("_", " "), el("input", { name, type: "number", step: "any", placeholder: "as the model" }))));
  for (const field of form.elements) if (field.name) field.value = chosen[field.name] ?? "";
  $("fault").textContent = "";
  $("choices").showModal();
}

function keepSettings(event) {
  if (event.submitter?.value !== "yes") return;
  const given = Object.fromEntries(new FormData(event.target));
  try {
    if (given.tools && !Array.isArray(JSON.parse(given.tools))) throw new Error();
  } catch {
    event.preventDefault();
    $("fault").textContent = "Tools must be a JSON array.";
    return;
  }
  saveSettings(given);
  for (const follower of followers.values()) follower.reconnect();
}

// export and import

async function save() {
  const kept = ({ body, key, live, stream, cursor, ...rest }) => rest;
  const whole = { format: "headrace-conversations-1", conversations: await store.conversations(), messages: (await store.allMessages()).map(kept) };
  const link = el("a", { href: URL.createObjectURL(new Blob([JSON.stringify(whole)], { type: "application/json" })), download: "conversations.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

async function load(file) {
  const text = (value) => (typeof value === "string" ? value : "");
  const number = (value) => (Number.isFinite(value) ? value : 0);
  try {
    const whole = JSON.parse(await file.text());
    const ids = new Map();
    const id = (old) => (typeof old !== "string" ? null : ids.get(old) ?? ids.set(old, newId()).get(old));
    const conversations = whole.conversations.map((one) => ({ id: id(one.id), title: text(one.title).slice(0, 200) || "Imported", created: number(one.created), updated: number(one.updated), leaf: id(one.leaf) }));
    const imported = whole.messages.map((one) => ({
      id: id(one.id), conversation: id(one.conversation), parent: id(one.parent), role: one.role === "user" ? "user" : "assistant",
      text: text(one.text), reasoning: text(one.reasoning), created: number(one.created), outcome: "done",
      calls: (Array.isArray(one.calls) ? one.calls : []).map((call) => ({ id: text(call.id), name: text(call.name), arguments: text(call.arguments) })),
    }));
    await store.saveAll({ conversations, messages: imported });
    await showList();
  } catch {
    $("news").textContent = "This file holds no conversations.";
  }
}

// the page

async function search() {
  const wanted = $("search").value.trim().toLowerCase();
  found = null;
  if (wanted) {
    const inTitles = (await store.conversations()).filter((one) => one.title.toLowerCase().includes(wanted)).map((one) => one.id);
    const inTexts = (await store.allMessages()).filter((one) => one.text.toLowerCase().includes(wanted)).map((one) => one.conversation);
    found = new Set([...inTitles, ...inTexts]);
  }
  await showList();
}

async function rename() {
  const title = await question("Rename the conversation", current.title);
  if (!title) return;
  current.title = title.slice(0, 200);
  await store.saveConversation(current);
  await show(current.id);
}

function submit() {
  const text = $("input").value;
  if (!text.trim() || $("send").hidden) return;
  $("input").value = "";
  send(text, current?.leaf);
}

$("composer").addEventListener("submit", (event) => (event.preventDefault(), submit()));
$("input").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
$("stop").addEventListener("click", () => path().forEach((message) => followers.get(message.id)?.stop()));
$("new").addEventListener("click", () => show(null).then(() => $("input").focus()));
$("rename").addEventListener("click", rename);
$("delete").addEventListener("click", remove);
$("settings").addEventListener("click", openSettings);
$("choices").querySelector("form").addEventListener("submit", keepSettings);
$("search").addEventListener("input", search);
$("export").addEventListener("click", save);
$("import").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", (event) => event.target.files[0] && load(event.target.files[0]));
$("open-side").addEventListener("click", () => document.body.classList.add("with-side"));
$("close-side").addEventListener("click", () => document.body.classList.remove("with-side"));

addEventListener("online", () => followers.forEach((follower) => follower.reconnect()));
document.addEventListener("visibilitychange", () => {
  for (const follower of followers.values()) {
    if (document.hidden) store.saveAnswer(follower.answer);
    else if (Date.now() - follower.heardAt > 3000) follower.reconnect();
  }
});
setInterval(() => followers.forEach(changed), 1000);

// Another tab has changed a conversation.
store.onChange(async ({ conversation }) => {
  const isOurs = conversation === current?.id && ![...followers.values()].some((one) => one.answer.conversation === conversation);
  if (isOurs) await show(conversation);
  else await showList().then(followLive);
});

ask("/v1/models").then(async (response) => {
  if (!response.ok) $("news").textContent = (await errorOf(response)).message;
  if (response.status === 401) openSettings();
}).catch(() => {});
await show(location.hash.slice(1));
