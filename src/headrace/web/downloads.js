// Models that the server can download: lists them; starts, stops and continues downloads; uses and removes models.

import { ask, errorOf } from "./api.js";
import { button, duration, el } from "./dom.js";
import { bytes } from "./files.js";
import { settings } from "./settings.js";
import { toast } from "./toast.js";

const PAUSE_MS = 1000;
const $ = (id) => document.getElementById(id);
// By the name of the model.
const rows = new Map();
let acts = {};
let timer = 0;

// On a server with keys, only the operator may change the list of models.
const asOperator = () => (settings().adminKey ? { Authorization: `Bearer ${settings().adminKey}` } : {});

// Sends an action and shows its error, if there is one and no row shows it.
async function tell(method, path, model) {
  const body = model && { body: JSON.stringify({ model }) };
  const response = await ask(path, { method, ...body, headers: { "Content-Type": "application/json", ...asOperator() } }).catch(() => null);
  const fault = !response ? "The server cannot be reached." : response.ok ? "" : (await errorOf(response)).message;
  await look();
  $("pull-fault").textContent = rows.get(model)?.state === "failed" ? "" : fault;
}

const begin = (model) => tell("POST", "/models", model);
const stop = (model) => tell("POST", "/models/unload", model);
const remove = (model) => tell("DELETE", `/models?model=${encodeURIComponent(model)}`);

// Shows the models that the server offers, each in a row of its own, before any of them is downloaded.
async function offer() {
  const response = await ask("/models/available").catch(() => null);
  if (!response?.ok) return;
  const { data, memory_bytes: memory, usable_bytes: usable } = await response.json();
  for (const one of data) rowOf(one.id).describe(one);
  const num = data.filter(({ fits }) => !fits).length;
  $("memory").hidden = !memory;
  $("memory").textContent = `The server's machine has ${bytes(memory)} of memory; a model may use ${bytes(usable)} of it.`;
  $("too-large").hidden = !num;
  $("too-large").firstElementChild.textContent = `${num} ${num === 1 ? "model needs" : "models need"} more memory than that`;
}

async function look() {
  clearTimeout(timer);
  const response = await ask("/models").catch(() => null);
  if (response?.ok) show((await response.json()).data.filter(({ id, pulled }) => pulled || rows.has(id)));
  const isDue = $("pulls").open || [...rows.values()].some(({ state }) => state === "downloading");
  // Another call of `look` may have set a timer meanwhile.
  clearTimeout(timer);
  if (isDue) timer = setTimeout(look, PAUSE_MS);
}

function show(models) {
  const known = new Map(models.map((one) => [one.id, one]));
  for (const { id, pulled, status } of models) rowOf(id).show(stateOf(status), status, pulled);
  for (const [id, row] of rows) {
    if (known.has(id)) continue;
    if (row.facts) row.show("offered");
    else rows.delete(id), row.node.remove();
  }
}

function rowOf(id) {
  if (!rows.has(id)) rows.set(id, new Row(id));
  return rows.get(id);
}

const stateOf = ({ failed, value }) => (failed ? "failed" : ["downloading", "stopped"].includes(value) ? value : "here");
// `number` is in billions.
const inWords = (number) => (number < 0.5 ? `${Math.round(1000 * number)} million` : `${Number(number.toPrecision(3))} billion`);

// Shows one model: what it is, if the server offers it, and the state of its download: offered, downloading,
// stopped, failed or here.
class Row {
  constructor(id) {
    this.id = id;
    this.facts = null;
    this.about = el("span", { class: "what" });
    this.words = el("span", { class: "soft" });
    this.bar = el("progress", { "aria-label": `Download of ${id}` });
    this.acts = el("span", { class: "row" });
    this.node = el("li", {}, el("strong", { class: "name", title: id }, id), this.about, this.words, this.bar, this.acts);
    $("pulled").append(this.node);
  }

  describe(facts) {
    if (this.facts) return;
    const { about, parameters, active, bytes: size, memory_bytes: memory, license, fits } = facts;
    this.facts = facts;
    this.about.append(about, el("span", { class: "soft" }, [`${inWords(parameters)} parameters${active ? `, ${active} active` : ""}`, bytes(size), `${bytes(memory)} of memory`, license].join(" · ")));
    if (!fits) $("too-large").lastElementChild.append(this.node);
    if (!this.state) this.show("offered");
  }

  // `status` is the server's status of the model. The server can remove only models that it has `pulled`.
  show(state, status = {}, pulled = false) {
    if (state === "here" && this.state === "downloading") acts.came(toast(`${this.id} is downloaded.`));
    const words = this.told(state, status);
    this.words.className = state === "failed" ? "trouble" : "soft";
    this.words.role = state === "failed" ? "alert" : null;
    // A screen reader repeats an alert that is set again.
    if (this.words.textContent !== words) this.words.textContent = words;
    const { bytes_done: done, bytes_total: total } = status;
    this.bar.hidden = ["offered", "here"].includes(state) || (!total && state !== "downloading");
    if (total) Object.assign(this.bar, { max: total, value: done });
    else this.bar.removeAttribute("value");
    if (state !== this.state) this.showButtons(this.buttons(state, pulled));
    this.state = state;
    if (!["offered", "here"].includes(state) && this.facts && !this.facts.fits) $("too-large").open = true;
  }

  // The focus stays in the row when the button that had it disappears.
  showButtons(buttons) {
    const hadFocus = this.acts.contains(document.activeElement);
    this.acts.replaceChildren(...buttons);
    if (hadFocus) buttons[0]?.focus();
  }

  told(state, { bytes_done: done, bytes_total: total, bytes_per_s: pace, seconds_left: left, error }) {
    const size = total ? `${bytes(done)} of ${bytes(total)}` : "";
    if (state === "offered") return "";
    if (state === "here") return "Downloaded";
    if (state === "failed") return withHint(this.id, error?.message ?? "It could not be downloaded.");
    if (state === "stopped") return `Stopped${size && ` at ${size}`}; the downloaded part is kept`;
    return [size || "Asking the hub", pace && `${bytes(pace)}/s`, left != null && `${duration(left)} left`].filter(Boolean).join(" · ");
  }

  buttons(state, pulled) {
    const { id } = this;
    const named = (words, act, more) => button(words, act, { "aria-label": `${words} ${id}`, ...more });
    const get = (words, more) => named(words, () => (this.show("downloading"), begin(id)), more);
    const isSilent = this.facts?.kind === "embedding";
    const first = {
      offered: () => get("Get"),
      downloading: () => named("Stop", () => stop(id)),
      stopped: () => get("Continue"),
      failed: () => get("Try again"),
      here: () => !isSilent && named("Use", () => ($("pulls").close(), acts.use(id)), { class: "primary" }),
    }[state]();
    const isRemovable = pulled && state !== "downloading";
    return [first, isRemovable && named("Remove", () => remove(id))].filter(Boolean);
  }
}

// Adds to an error that one model does not come from the hub.
const withHint = (id, words) => (/smollm2/.test(id + words) ? words : `${words} smollm2 comes from the package index instead of the hub.`);

// `use` is called with the name of a model to talk to, and `came` when a download has finished.
export function openDownloads({ use, came }) {
  acts = { use, came };
  $("pull-fault").textContent = "";
  $("pulls").showModal();
  offer().finally(look);
}

$("pulls").querySelector("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const field = $("pulls").querySelector("input");
  const send = event.target.querySelector(".primary");
  if (send.disabled || !field.value.trim()) return;
  send.disabled = true;
  await begin(field.value.trim());
  send.disabled = false;
  if (!$("pull-fault").textContent) field.value = "";
});
