// The chat: shows one conversation, sends messages, and runs a follower for each unfinished answer.

import { areRead, attach, draft as written, isReading, onDraft, putBack, setText, showDraft, takeDraft } from "./composer.js";
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
import { drawnBy, GET, hasNone, isOneOfSeveral, isSilent, knownOf, learn, loadModels, modelOf, showModels, takesImages } from "./models.js";
import { isAway, lookAtServer } from "./presence.js";
import { purgeDeleted, remove } from "./removal.js";
import { renameIn } from "./rename.js";
import { countSoon, isTooLong } from "./room.js";
import { markIn, search } from "./search.js";
import { ADVANCED, choicesOf, defaults, faultOf, sampling, saveSettings, settings } from "./settings.js";
import { listen, showShortcuts } from "./shortcuts.js";
import * as store from "./store.js";
import { toast } from "./toast.js";
import { exportAll, exportJson, exportMarkdown, importAll } from "./transfer.js";
import { forgetTyped } from "./typed.js";
import { isTooLong as isRefused, showNotice } from "./weight.js";
import { welcome } from "./welcome.js";

const $ = (id) => document.getElementById(id);
// Longest time to build nodes in one frame; style and layout take many times as long.
const SLICE_MS = 2;
const MAX_TITLE = 200; // characters
// By message id.
const followers = new Map();
// The conversation in view, and its messages.
let current = null;
let messages = new Map();
let views = new Map();
// The options of a conversation that has not begun.
let draft = defaults();
// Counts the calls of `show`, so that only the last one has an effect.
let numShows = 0;
// Whether the server has refused the key, or needs one.
let isLocked = false;
// Whether the notice is about the server, and not about an action.
let isOfServer = false;
const NOT_KEPT = "This browser cannot save messages: its disk is full, or its storage is blocked. A message that is not saved is not sent.";
const WRONG_KEY = "The server does not accept this key.";
// Ids of messages to draw again.
const due = new Set();
// Whether a paint is scheduled.
let isPainting = false;
// Whether the thread is scrolled to its end; it stays there when the window changes its size.
let isAtEnd = true;

// The conversation in view

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
  // Adds another version of an answer, edited by hand, which can be continued.
  async amend(message, text) {
    const amended = { ...newMessage("assistant", text, message.parent), model: message.model, outcome: "edited" };
    await keepTurn([amended], { leaf: amended.id });
  },
  // Continues the same answer from its end.
  async goOn(message) {
    const earlier = [...(message.earlier ?? []), message.stream].filter(Boolean);
    const due = { ...message, ...asked(message, message.wanted, { continue_final_message: true }), earlier };
    for (const name of ["outcome", "code", "error", "finish", "stopping", "usage", "timings"]) delete due[name];
    await keepTurn([due], { updated: Date.now() });
    follow(due);
  },
  // Takes a message that was too long out of the conversation and puts it back into the field.
  async putBack(message) {
    const { parent: leaf, text, files = [], images = [] } = messages.get(message.parent);
    await store.changeConversation(current.id, { leaf });
    current.leaf = leaf;
    showThread();
    const shown = images.map((url, k) => ({ kind: "image", name: `Picture ${k + 1}`, size: Math.round(url.length * 0.75), url }));
    putBack(text, [...shown, ...files.map((file) => ({ kind: "text", ...file }))]);
  },
  isLeaf: (message) => message.id === current?.leaf,
  before: (message) => messages.get(message.parent),
  async giveResults(message, texts) {
    const results = message.calls.map(({ id, name }, k) => ({ id, name, text: texts[k] }));
    const given = { ...newMessage("tool", texts.join("\n"), message.id), results };
    await answer([given], given.id);
    forgetTyped(message.id);
  },
  // Returns the fields of the request that led to an answer, if they are text alone.
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
  // Draw what is in view first.
  for (const id of [...views.keys()].reverse()) due.add(id);
  paint();
}

function showTitle() {
  $("title").textContent = $("title").title = current?.title ?? "New conversation";
  document.title = current ? `${current.title} · Headrace` : "Headrace";
}

const choices = () => (current ? current.choices ?? defaults() : draft);

function showChoices() {
  const model = modelOf(choices());
  showModels($("model"), model);
  showWelcome(model);
  count();
}

// Shows the welcome screen in an empty conversation, first without the properties that are still unknown.
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
  const obstacle = obstacleNow();
  $("send").disabled = Boolean(obstacle);
  $("send").title = obstacle || "Send (Enter)";
}

// Returns why no message can be sent now, or "". A message may be sent while the models are unknown.
function obstacleNow() {
  const { text, files } = written();
  if (isAway()) return "The server cannot be reached.";
  if (hasNone()) return "The server has no model.";
  if (isLocked) return "This server needs a key.";
  if (isSilent(modelOf(choices()))) return "This model cannot write answers.";
  if (!text.trim() && !files.length && !isReading()) return "The message is empty.";
  if (isStuck()) return "The message above is too long: take it back and shorten it.";
  return isTooLong() ? "The message is too long for the model." : "";
}

// Whether the conversation ends with a message that was too long.
function isStuck() {
  const leaf = messages.get(current?.leaf);
  return Boolean(leaf) && isRefused(leaf);
}

const count = () => countSoon($("room"), next, showButtons);

const list = new ConversationList($("list"), { open: openFound, rename, items: itemsOf });
const isLive = (id) => [...followers.values()].some(({ answer }) => answer.conversation === id);
const showList = () => list.show(current?.id, isLive);

async function show(id) {
  const number = ++numShows;
  const found = id ? (await store.conversation(id)) ?? null : null;
  if (number !== numShows) return;
  current = found;
  if (!current) draft = defaults();
  const all = current ? await store.messagesOf(id) : [];
  if (number !== numShows) return;
  messages = new Map(all.map((one) => [one.id, followers.get(one.id)?.answer ?? one]));
  // A missing conversation keeps no entry in the history, since Back would stop there each time.
  if (id && !current) location.replace("#");
  else location.hash = current?.id ?? "";
  document.body.classList.remove("with-side");
  showDraft(current?.id);
  showThread();
  await showList();
  await followLive();
}

// Answers

$("thread").addEventListener("scroll", ({ target }) => (isAtEnd = target.scrollHeight - target.scrollTop - target.clientHeight < 80));
new ResizeObserver(() => isAtEnd && ($("thread").scrollTop = $("thread").scrollHeight)).observe($("thread"));

// A tap on a message shows its figures and actions where nothing hovers.
$("thread").addEventListener("click", ({ target }) => {
  document.querySelector(".message.tapped")?.classList.remove("tapped");
  target.closest(".message")?.classList.add("tapped");
});

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

// Paints at most once per frame. A hidden page has no frames, so it paints by a timer, less often.
function paintSoon() {
  if (!isPainting) (document.hidden ? (act) => setTimeout(act, 200) : requestAnimationFrame)(paint);
  isPainting = true;
}

// Paints until the frame's time is used up; the next frames continue.
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

// Returns a text as a title: one line, with "…" at its end if it was cut.
function titleOf(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE - 1).trimEnd()}…` : line;
}

async function send({ text, images, files }, parent) {
  const title = titleOf(text) || files?.[0]?.name || "Images";
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

// Returns the fields of an unfinished answer after `leaf`: the bytes and the key of its POST.
function asked(leaf, model = modelOf(choices()), more = {}) {
  const fields = { messages: history(leaf), stream: true, return_progress: true, timings_per_token: true, ...more };
  return { wanted: model, live: 1, stream: null, cursor: "", key: newId(), body: JSON.stringify({ ...fields, ...sampling({ ...choices(), model }) }) };
}

// Saves the answer and its request to disk before the request is sent.
async function answer(before, parent, model) {
  const due = { ...newMessage("assistant", "", parent), ...asked(before.at(-1) ?? messages.get(parent), model) };
  due.created += 1;
  await keepTurn([...before, due], { leaf: due.id, updated: Date.now() });
  follow(due);
  $("news").textContent = "Sent.";
}

// Shows a turn of the conversation in view after it was saved; a turn that cannot be saved changes nothing.
async function keepTurn(turn, changes) {
  const { id } = current;
  await store.saveTurn({ ...current, ...changes }, turn);
  // Another conversation has been opened meanwhile.
  if (current?.id !== id) return;
  Object.assign(current, changes);
  for (const message of turn) messages.set(message.id, message);
  location.hash = id;
  showThread();
}

// Dialogs

// Opens the settings, which have the key and the defaults for new conversations, or the options of this
// conversation.
function openChoices(isOwn) {
  const form = $("choices").querySelector("form");
  const chosen = isOwn ? choices() : settings();
  $("choices-title").textContent = isOwn ? "Options of this conversation" : "Settings";
  for (const name of ["key-field", "look", "scope"]) $(name).hidden = isOwn;
  $("advanced").open = isLocked && !isOwn;
  $("numbers").replaceChildren(...ADVANCED.map((name) => el("label", {}, name[0].toUpperCase() + name.slice(1).replaceAll("_", " "), el("input", { name, type: "number", step: "any", placeholder: "model default" }))));
  for (const field of form.elements) if (field.name) field.value = chosen[field.name] ?? "";
  $("fault").textContent = "";
  form.onsubmit = (event) => keepChoices(event, isOwn);
  $("choices").showModal();
  showDrawn(modelOf(choices()));
}

async function showDrawn(model) {
  const drawn = await drawnBy(model);
  for (const field of $("choices").querySelectorAll("input[type=number]")) if (drawn[field.name] >= 0) field.placeholder = Number(drawn[field.name].toPrecision(4));
}

async function keepChoices(event, isOwn) {
  const given = Object.fromEntries(new FormData(event.target));
  $("fault").textContent = faultOf(given);
  if ($("fault").textContent) {
    $("advanced").open = true;
    return void event.preventDefault();
  }
  if (isOwn) return choose(given);
  saveSettings(given);
  applyLook();
  if (!current) draft = defaults();
  showChoices();
  await takeKey(given.key);
}

// Tries a key; returns why the server refused it, or "".
async function takeKey(key) {
  saveSettings({ key });
  followers.forEach((follower) => follower.reconnect());
  return (await refreshModels())?.status === 401 ? WRONG_KEY : "";
}

// Changes options of this conversation alone.
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
    isLocked = error?.status === 401;
    const fault = settings().key ? WRONG_KEY : "";
    const remind = () => notice("This server needs a key.", true, ["Enter a key", () => askForKey(fault, takeKey, remind, true)]);
    if (isLocked) askForKey(fault, takeKey, remind);
    else if (error && error.code !== "model_loading") notice(error.message, true);
    else if (isOfServer) notice("");
    showChoices();
    // Some messages offer the other models.
    for (const id of views.keys()) due.add(id);
    paintSoon();
    return error;
  } catch {
    // The followers report that the server is away.
    return null;
  }
}

// Checks whether the server can be reached, and how far it is while it loads its only model.
async function followServer(isUrgent) {
  const before = isLoading();
  const isBack = await lookAtServer(isUrgent);
  showLoad($("loading"));
  showButtons();
  if (isBack) followers.forEach((follower) => follower.reconnect());
  if (isBack) await refreshModels();
  if (isLoading() !== before) $("news").textContent = isLoading() ? "The server is loading its model." : "The model is loaded.";
  if (!before || isLoading()) return;
  for (const follower of followers.values()) if (follower.status.trouble) follower.reconnect();
  await refreshModels();
}

// Files

const texts = (files) => files.filter(({ kind }) => kind === "text").map(({ name, text, size, pages }) => ({ name, text, size, pages }));
const pictures = (files) => files.filter(({ kind }) => kind === "image").map(({ url }) => url);

// Returns the messages as they would be sent now, to count their tokens. Pictures are left out: they take context
// too, but only the model knows how much.
function next() {
  const { text, files } = written();
  const isEmpty = !text.trim() && !files.length;
  if (isStuck()) return { messages: [], files };
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

// The page

async function rename(conversation, title) {
  await store.changeConversation(conversation.id, { title });
  if (conversation.id === current?.id) current.title = title;
  showTitle();
  await showList();
}

// Returns the items of a conversation's menu, except for renaming.
function itemsOf(conversation) {
  const letGo = (message) => followers.get(message)?.close();
  // The row may show an older branch.
  const now = () => store.conversation(conversation.id);
  const removed = async () => {
    await remove(conversation, letGo, show);
    await (conversation.id === current?.id ? show(null) : showList());
    $("input").focus();
  };
  return [
    ["save", "Export as Markdown", () => now().then(exportMarkdown)],
    ["save", "Export as JSON", () => now().then(exportJson)],
    ["trash", "Delete", removed, true],
  ];
}

function renameShown() {
  const shown = current;
  renameIn($("title"), shown.title, (title) => rename(shown, title));
}

// Opens a conversation that the search has found, at the place of the words.
async function openFound(id) {
  const message = list.found?.get(id)?.message;
  await show(id);
  if (!message || current?.id !== id) return;
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
  if ($("send").hidden) return;
  const obstacle = obstacleNow();
  if (obstacle) return void ($("news").textContent = obstacle);
  const taken = takeDraft();
  send({ text: taken.text, images: pictures(taken.files), files: texts(taken.files) }, current?.leaf).then(taken.settle, taken.giveBack);
  notice("");
}

// `ofServer` marks a notice about the key or the models, which disappears once these are available.
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
  // Escape first closes an open dialog, menu or search.
  const isTaken = isComposing || shiftKey || target === $("search") || document.querySelector("dialog[open], :popover-open");
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
  if (file) await importAll(file).then((told) => (notice(""), toast(told)), () => notice("This file contains no conversations."));
  target.value = "";
  await show(current?.id);
});
$("model").addEventListener("focus", refreshModels);
$("model").addEventListener("change", ({ target: { value } }) => {
  if (value !== GET) return speakTo(value);
  $("model").value = modelOf(choices());
  getModel();
});
function getModel() {
  openDownloads({ use: speakTo, came: refreshModels });
}
async function speakTo(model) {
  saveSettings({ model });
  await choose({ model });
}
listenForFiles(attachAll);
onDraft(() => (showButtons(), count()));
const openSide = () => document.body.classList.add("with-side");
$("open-side").addEventListener("click", () => (openSide(), $("close-side").focus()));
const closeSide = () => {
  document.body.classList.remove("with-side");
  $("open-side").focus();
};
$("close-side").addEventListener("click", closeSide);

// Back and Forward. Each conversation is an entry in the history.
addEventListener("hashchange", () => {
  const id = location.hash.slice(1);
  if (id !== (current?.id ?? "")) show(id);
});
// The hash names the conversation, so this link may not change it.
document.querySelector(".skip").addEventListener("click", (event) => (event.preventDefault(), $("input").focus()));

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
  // A model may be loading.
  if (isSilent && isOneOfSeveral() && !document.hidden) refreshModels();
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

// Takes over only the title and options, since this tab is receiving an answer.
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
// Without a named conversation, the page opens the conversation whose answer began last and still runs.
const running = (await store.liveMessages()).sort((a, b) => b.created - a.created);
// A message may have been sent while the page was loading.
if (!current) await show(location.hash.slice(1) || running[0]?.conversation);
