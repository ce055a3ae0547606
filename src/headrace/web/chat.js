// The chat: which conversation is in view, what is sent, and a follower for each answer due.

import { areRead, attach, draft as written, isReading, onDraft, setText, showDraft, takeDraft } from "./composer.js";
import { askForKey } from "./dialogs.js";
import { el, newId } from "./dom.js";
import { openDownloads } from "./downloads.js";
import { listenForFiles } from "./dropping.js";
import { asText, readFile } from "./files.js";
import { Follower } from "./follow.js";
import { drawIcons } from "./icons.js";
import { ConversationList } from "./list.js";
import { isLoading, showLoad } from "./loading.js";
import { openMenu } from "./menu.js";
import { MessageView } from "./message.js";
import { drawnBy, isOneOfSeveral, knownOf, learn, loadModels, modelOf, showModels, takesImages } from "./models.js";
import { lookAtServer } from "./presence.js";
import { purgeDeleted, remove } from "./removal.js";
import { renameIn } from "./rename.js";
import { countSoon } from "./room.js";
import { markIn, search } from "./search.js";
import { choicesOf, defaults, faultOf, NUMBERS, sampling, saveSettings, settings } from "./settings.js";
import { listen, showShortcuts } from "./shortcuts.js";
import * as store from "./store.js";
import { toast } from "./toast.js";
import { exportAll, exportJson, exportMarkdown, importAll } from "./transfer.js";
import { forgetTyped } from "./typed.js";
import { showNotice } from "./weight.js";
import { welcome } from "./welcome.js";

const $ = (id) => document.getElementById(id);
const SLICE_MS = 2; // of building in a frame; style and layout take many times as long
const followers = new Map(); // by message id
let current = null; // the conversation in view
let messages = new Map(); // its messages
let views = new Map();
let draft = defaults(); // the choices of a conversation that has not begun
let isOfServer = false; // the notice
const NOT_KEPT = "This browser keeps nothing more for this page: its disk is full, or its storage closed. What is not kept is not sent.";
const WRONG_KEY = "The server does not take this key.";
const due = new Set(); // ids of messages that are to be shown anew
let isPainting = false; // soon
let isAtEnd = true; // of the thread: a window that changes its size leaves it so

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
    await store.changeConversation(current.id, { leaf: leaf.id });
    current.leaf = leaf.id;
    showThread();
  },
  edit: (message, text) => send({ ...message, text }, message.parent),
  // Another version of an answer, which can be continued.
  async amend(message, text) {
    const amended = { ...newMessage("assistant", text, message.parent), model: message.model, outcome: "edited" };
    await keepTurn([amended], { leaf: amended.id });
  },
  // The same answer, from where it ends.
  async goOn(message) {
    const earlier = [...(message.earlier ?? []), message.stream].filter(Boolean);
    const due = { ...message, ...asked(message, message.wanted, { continue_final_message: true }), earlier };
    for (const name of ["outcome", "code", "error", "finish", "stopping", "usage", "timings"]) delete due[name];
    await keepTurn([due], { updated: Date.now() });
    follow(due);
  },
  isLeaf: (message) => message.id === current?.leaf,
  before: (message) => messages.get(message.parent),
  async giveResults(message, texts) {
    const results = message.calls.map(({ id, name }, k) => ({ id, name, text: texts[k] }));
    const given = { ...newMessage("tool", texts.join("\n"), message.id), results };
    await answer([given], given.id);
    forgetTyped(message.id);
  },
  // What an answer was for, if that is text alone.
  fieldsOf(message) {
    const turns = history(messages.get(message.parent));
    const { tools } = sampling(choices());
    return turns.every(({ content }) => typeof content === "string") ? { messages: turns, tools, model: message.model ?? modelOf(choices()) } : null;
  },
  regenerate: (message, model) => answer([], message.parent, model),
};

function showThread() {
  const thread = $("thread");
  views = new Map(path().map((message) => [message.id, new MessageView(message, acts)]));
  thread.replaceChildren(...[...views.values()].map(({ node }) => node));
  showTitle();
  $("title").disabled = $("menu").hidden = !current;
  showChoices();
  isAtEnd = true;
  due.clear();
  for (const id of [...views.keys()].reverse()) due.add(id); // what is in view comes first
  paint();
}

function showTitle() {
  $("title").textContent = current?.title ?? "New conversation";
  document.title = current ? `${current.title} · Headrace` : "Headrace";
}

const choices = () => (current ? current.choices ?? defaults() : draft);

function showChoices() {
  const model = modelOf(choices());
  showModels($("model"), model);
  showWelcome(model);
  countSoon($("room"), next);
}

// What an empty conversation has instead of messages; what is not known yet comes later.
async function showWelcome(id) {
  if (views.size) return;
  const look = () => (setText("What is in this picture?"), $("given").click());
  const begin = ({ prompt, tools }) => {
    if (tools) choose({ tools: JSON.stringify(tools, null, 2) });
    setText(prompt);
  };
  const draw = (model) => views.size || $("thread").replaceChildren(welcome(model, { begin, look, get: getModel }));
  draw(knownOf(id));
  if (await learn(id)) draw(knownOf(id));
}

function showButtons() {
  const isLive = path().some((message) => message.live);
  $("stop").hidden = !isLive;
  $("send").hidden = isLive;
}

const list = new ConversationList($("list"), { open: openFound, rename, items: itemsOf });
const isLive = (id) => [...followers.values()].some(({ answer }) => answer.conversation === id);
const showList = () => list.show(current?.id, isLive);

async function show(id) {
  current = id ? (await store.conversation(id)) ?? null : null;
  if (!current) draft = defaults();
  messages = new Map((current ? await store.messagesOf(id) : []).map((one) => [one.id, followers.get(one.id)?.answer ?? one]));
  location.hash = current ? current.id : "";
  document.body.classList.remove("with-side");
  showDraft(current?.id);
  showThread();
  await showList();
  await followLive();
}

// answers

$("thread").addEventListener("scroll", ({ target }) => (isAtEnd = target.scrollHeight - target.scrollTop - target.clientHeight < 80));
new ResizeObserver(() => isAtEnd && ($("thread").scrollTop = $("thread").scrollHeight)).observe($("thread"));

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
    refreshModels();
  });
  showList();
}

async function followLive() {
  for (const message of await store.liveMessages()) {
    follow(messages.get(message.id)?.live ? messages.get(message.id) : message);
  }
}

function changed({ answer }) {
  if (!inView(answer)) return;
  due.add(answer.id);
  paintSoon();
}

// At most once a frame; seldom while the page is hidden, when there are none.
function paintSoon() {
  if (!isPainting) (document.hidden ? (act) => setTimeout(act, 200) : requestAnimationFrame)(paint);
  isPainting = true;
}

// What one frame has no time for, the next ones show.
function paint() {
  isPainting = false;
  const thread = $("thread");
  const wasAtEnd = isAtEnd;
  const deadline = performance.now() + SLICE_MS;
  for (const id of due) {
    if (views.get(id)?.show(followers.get(id), deadline) ?? true) due.delete(id);
    if (performance.now() > deadline) break;
  }
  if (due.size) paintSoon();
  if (wasAtEnd) thread.scrollTop = thread.scrollHeight;
  showButtons();
}

function history(leaf) {
  const turns = [];
  for (let at = leaf; at; at = messages.get(at.parent)) turns.unshift(at);
  const system = (choices().system ?? "").trim();
  return [...(system ? [{ role: "system", content: system }] : []), ...turns.flatMap(asSent)];
}

function asSent({ role, text: typed, calls, images, files, results }) {
  if (role === "tool") return results.map(({ id, text: content }) => ({ role, tool_call_id: id, content }));
  const pictures = (images ?? []).map((url) => ({ type: "image_url", image_url: { url } }));
  const text = [...(files ?? []).map(asText), typed].filter(Boolean).join("\n\n");
  const content = pictures.length ? [...pictures, { type: "text", text }] : text;
  const made = calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
  return [{ role, content, ...(made.length ? { tool_calls: made } : {}) }];
}

function newMessage(role, text, parent) {
  return { id: newId(), conversation: current.id, parent: parent ?? null, role, text, reasoning: "", calls: [], created: Date.now() };
}

async function send({ text, images, files }, parent) {
  const title = (text.trim() || files?.[0]?.name || "Images").slice(0, 60);
  const isFirst = !current;
  if (isFirst) current = { id: newId(), title, created: Date.now(), choices: draft };
  showDraft(current.id);
  const asked = { ...newMessage("user", text, parent), images, files };
  await answer([asked], asked.id).catch((error) => {
    const isUndone = isFirst && inView(asked);
    if (isUndone) current = null;
    if (isUndone) showDraft(null);
    throw error;
  });
}

// How an answer behind `leaf` is asked for: the bytes and the key of its POST.
function asked(leaf, model = modelOf(choices()), more = {}) {
  const fields = { messages: history(leaf), stream: true, return_progress: true, timings_per_token: true, ...more };
  return { wanted: model, live: 1, stream: null, cursor: "", key: newId(), body: JSON.stringify({ ...fields, ...sampling({ ...choices(), model }) }) };
}

// The answer is on the disk, and how it is asked for, before that is sent.
async function answer(before, parent, model) {
  const due = { ...newMessage("assistant", "", parent), ...asked(before.at(-1) ?? messages.get(parent), model) };
  due.created += 1;
  await keepTurn([...before, due], { leaf: due.id, updated: Date.now() });
  follow(due);
  $("news").textContent = "Sent.";
}

// Shows a turn of the conversation in view once it is kept: what is not kept changes nothing.
async function keepTurn(turn, changes) {
  const { id } = current;
  await store.saveTurn({ ...current, ...changes }, turn);
  if (current?.id !== id) return; // another one has been opened meanwhile
  Object.assign(current, changes);
  for (const message of turn) messages.set(message.id, message);
  location.hash = id;
  showThread();
}

// dialogs

// The settings: the key, and what new conversations begin with. The options: this conversation's own.
function openChoices(isOwn) {
  const form = $("choices").querySelector("form");
  const chosen = isOwn ? choices() : settings();
  $("choices-title").textContent = isOwn ? "Options of this conversation" : "Settings";
  $("key-field").hidden = $("scope").hidden = isOwn;
  $("numbers").replaceChildren(...NUMBERS.map((name) => el("label", {}, name[0].toUpperCase() + name.slice(1).replaceAll("_", " "), el("input", { name, type: "number", step: "any", placeholder: "as the model" }))));
  for (const field of form.elements) if (field.name) field.value = chosen[field.name] ?? "";
  $("fault").textContent = "";
  form.onsubmit = (event) => keepChoices(event, isOwn);
  $("choices").showModal();
  showDrawn(modelOf(choices()));
}

async function showDrawn(model) {
  const drawn = await drawnBy(model);
  for (const field of $("numbers").querySelectorAll("input")) if (drawn[field.name] >= 0) field.placeholder = Number(drawn[field.name].toPrecision(4));
}

async function keepChoices(event, isOwn) {
  const given = Object.fromEntries(new FormData(event.target));
  $("fault").textContent = faultOf(given);
  if ($("fault").textContent) return void event.preventDefault();
  if (isOwn) return choose(given);
  saveSettings(given);
  if (!current) draft = defaults();
  showChoices();
  await takeKey(given.key);
}

// Tries a key, and says what is wrong with it.
async function takeKey(key) {
  saveSettings({ key });
  followers.forEach((follower) => follower.reconnect());
  return (await refreshModels())?.status === 401 ? WRONG_KEY : "";
}

// Of this conversation alone.
async function choose(given) {
  const chosen = choicesOf({ ...choices(), ...given });
  const own = current;
  if (own) await store.changeConversation(own.id, { choices: chosen });
  if (own) own.choices = chosen;
  else draft = chosen;
  showChoices();
}

async function refreshModels() {
  try {
    const error = await loadModels();
    const fault = settings().key ? WRONG_KEY : "";
    const remind = () => notice("This server asks for a key.", true, ["Enter it", () => askForKey(fault, takeKey, remind, true)]);
    if (error?.status === 401) askForKey(fault, takeKey, remind);
    else if (error && error.code !== "model_loading") notice(error.message, true);
    else if (isOfServer) notice("");
    showChoices();
    for (const id of views.keys()) due.add(id); // some offer the other models
    paintSoon();
    return error;
  } catch {
    return null; // the followers say when the server is away
  }
}

// Whether the server is there, and how far it is while it loads its only model.
async function followServer(isUrgent) {
  const before = isLoading();
  const isBack = await lookAtServer(isUrgent);
  showLoad($("loading"));
  if (isBack) followers.forEach((follower) => follower.reconnect());
  if (isBack) await refreshModels();
  if (isLoading() !== before) $("news").textContent = isLoading() ? "The server is loading its model." : "The model is loaded.";
  if (!before || isLoading()) return;
  for (const follower of followers.values()) if (follower.status.trouble) follower.reconnect();
  await refreshModels();
}

// files

const texts = (files) => files.filter(({ kind }) => kind === "text").map(({ name, text, size, pages }) => ({ name, text, size, pages }));
const pictures = (files) => files.filter(({ kind }) => kind === "image").map(({ url }) => url);

// What would be sent now, to be counted: pictures take room, too, but only the model knows how much.
function next() {
  const { text, files } = written();
  const isEmpty = !text.trim() && !files.length;
  const said = { role: "user", text, calls: [], files: texts(files) };
  const all = [...history(messages.get(current?.leaf)), ...(isEmpty ? [] : asSent(said))];
  const counted = all.map((one) => (Array.isArray(one.content) ? { ...one, content: one.content.at(-1).text } : one));
  const model = modelOf(choices());
  return { model, context: knownOf(model)?.context, messages: isEmpty && !current ? [] : counted, files };
}

async function attachAll(given) {
  const model = modelOf(choices());
  const all = await Promise.allSettled([...given].map((file) => attach(file.name, readFile(file, model, takesImages(model)))));
  notice(all.flatMap(({ reason }) => (reason ? [reason.message] : [])).join(" "));
  $("input").focus();
}

// the page

async function rename(conversation, title) {
  await store.changeConversation(conversation.id, { title });
  if (conversation.id !== current?.id) return showList();
  current.title = title;
  await show(current.id);
}

// What one may do with a conversation, but rename it.
function itemsOf(conversation) {
  const letGo = (message) => followers.get(message)?.close();
  const now = () => store.conversation(conversation.id); // the row may show an older branch
  const removed = async () => {
    await remove(conversation, letGo, show);
    await show(conversation.id === current?.id ? null : current?.id);
    $("input").focus();
  };
  return [
    ["save", "Export as Markdown", () => now().then(exportMarkdown)],
    ["save", "Export as JSON", () => now().then(exportJson)],
    ["trash", "Delete", removed, true],
  ];
}

const renameShown = () => renameIn($("title"), current.title, (title) => rename(current, title));

// Opens what the search has found, at the place.
async function openFound(id) {
  const message = list.found?.get(id)?.message;
  await show(id);
  if (!message) return;
  if (!views.has(message)) await acts.branch(messages.get(message));
  while (due.has(message)) await new Promise(requestAnimationFrame);
  isAtEnd = false;
  const place = markIn(views.get(message).node, $("search").value);
  (place?.startContainer.parentElement ?? views.get(message).node).scrollIntoView({ block: "center" });
}

async function searchNow() {
  const found = await search($("search").value);
  if (found === undefined) return;
  list.found = found;
  if (!found) markIn($("thread"), "");
  await showList();
}

function submit() {
  if (isReading()) return void areRead().then((isDone) => isDone && submit());
  const taken = $("send").hidden ? null : takeDraft();
  if (!taken) return;
  send({ text: taken.text, images: pictures(taken.files), files: texts(taken.files) }, current?.leaf).then(taken.settle, taken.giveBack);
  notice("");
}

// `ofServer`: about the key or the models; it goes when they are there.
function notice(text, ofServer = false, action) {
  isOfServer = ofServer;
  showNotice($("notice"), "fails", text, action);
}

const stop = () => path().forEach((message) => followers.get(message.id)?.stop());

$("composer").addEventListener("submit", (event) => (event.preventDefault(), submit()));
$("input").addEventListener("keydown", (event) => {
  if (event.key === "ArrowUp" && !event.target.value) editLast(event);
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});

function editLast(event) {
  const last = path().findLast(({ role }) => role === "user");
  if (!last) return;
  event.preventDefault();
  views.get(last.id).edit().focus();
}

$("stop").addEventListener("click", stop);
addEventListener("keydown", ({ key, target, shiftKey, isComposing }) => {
  const isTaken = isComposing || shiftKey || target === $("search") || document.querySelector("dialog[open], :popover-open"); // by what it closes
  if (key !== "Escape" || isTaken) return;
  if (document.body.classList.contains("with-side")) closeSide();
  else if (!$("stop").hidden) stop();
});
const create = () => show(null).then(() => $("input").focus());
$("new").addEventListener("click", create);
listen({
  create,
  search: () => (openSide(), $("search").focus(), $("search").select()),
  list: () => showShortcuts($("shortcuts")),
  focus: () => $("input").focus(),
});
$("title").addEventListener("click", renameShown);
$("menu").addEventListener("click", () => openMenu($("menu"), [["edit", "Rename", renameShown], ...itemsOf(current)]));
$("others").addEventListener("click", () => openMenu($("others"), [
  ["save", "Get a model", getModel],
  ["open", "Import conversations", () => $("file").click()],
  ["save", "Export all", exportAll],
  ["keyboard", "Keyboard", () => showShortcuts($("shortcuts"))],
]));
$("settings").addEventListener("click", () => openChoices(false));
$("options").addEventListener("click", () => openChoices(true));
$("search").addEventListener("input", searchNow);
$("search").addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown") list.focusFirst();
  if (event.key !== "Escape") return;
  event.target.value = "";
  searchNow().then(() => $("input").focus());
});
$("file").addEventListener("change", async ({ target }) => {
  const [file] = target.files;
  if (file) await importAll(file).then((told) => (notice(""), toast(told)), () => notice("This file holds no conversations."));
  target.value = "";
  await show(current?.id);
});
$("model").addEventListener("focus", refreshModels);
$("model").addEventListener("change", ({ target: { value } }) => speakTo(value));
function getModel() {
  openDownloads({ use: speakTo, came: refreshModels });
}
async function speakTo(model) {
  saveSettings({ model });
  await choose({ model });
}
listenForFiles(attachAll);
onDraft(() => countSoon($("room"), next));
const openSide = () => document.body.classList.add("with-side");
$("open-side").addEventListener("click", () => (openSide(), $("close-side").focus()));
const closeSide = () => {
  document.body.classList.remove("with-side");
  $("open-side").focus();
};
$("close-side").addEventListener("click", closeSide);

addEventListener("online", () => {
  followers.forEach((follower) => follower.reconnect());
  followServer(true);
});
addEventListener("offline", () => followServer(true));
document.addEventListener("visibilitychange", () => {
  for (const follower of followers.values()) {
    if (document.hidden) store.saveAnswer(follower.answer);
    else if (Date.now() - follower.heardAt > 3000) follower.reconnect();
  }
});
setInterval(() => {
  followers.forEach(changed);
  const isSilent = [...followers.values()].some((one) => !Object.keys(one.status).length && !one.answer.text);
  if (isSilent && isOneOfSeveral() && !document.hidden) refreshModels(); // one may be loading
  if (!document.hidden) followServer(isLoading() || [...followers.values()].some((one) => one.status.trouble));
}, 1000);

store.onFault(() => notice(NOT_KEPT));

// Another tab has changed a conversation.
store.onChange(async ({ conversation }) => {
  const isOurs = conversation === current?.id;
  if (isOurs && !isLive(conversation)) return show(conversation);
  if (isOurs) await takeChanges(current);
  await showList().then(followLive);
});

// Its name and its choices alone: an answer is coming here.
async function takeChanges(own) {
  const { title, choices } = (await store.conversation(own.id)) ?? own;
  Object.assign(own, { title, choices });
  showTitle();
  showChoices();
}

drawIcons();
purgeDeleted((message) => followers.get(message)?.close());
followServer(true);
refreshModels();
await show(location.hash.slice(1));
