// Models that the server gets from the hub: each with how far it is, stopped, gone on with, used.

import { ask, errorOf } from "./api.js";
import { button, duration, el } from "./dom.js";
import { bytes } from "./files.js";
import { settings } from "./settings.js";
import { toast } from "./toast.js";

const PAUSE_MS = 1000;
const $ = (id) => document.getElementById(id);
const rows = new Map(); // by the name of the model
let acts = {};
let timer = 0;

// On a server with keys it is the operator's to say which models there are.
const asOperator = () => (settings().adminKey ? { Authorization: `Bearer ${settings().adminKey}` } : {});

// Says what was wrong, or nothing.
async function tell(method, path, model) {
  const body = model && { body: JSON.stringify({ model }) };
  const response = await ask(path, { method, ...body, headers: { "Content-Type": "application/json", ...asOperator() } }).catch(() => null);
  $("pull-fault").textContent = !response ? "The server cannot be reached." : response.ok ? "" : (await errorOf(response)).message;
  await look();
}

const begin = (model) => tell("POST", "/models", model);
const stop = (model) => tell("POST", "/models/unload", model);
const remove = (model) => tell("DELETE", `/models?model=${encodeURIComponent(model)}`);

async function look() {
  clearTimeout(timer);
  const response = await ask("/models").catch(() => null);
  if (response?.ok) show((await response.json()).data.filter(({ pulled }) => pulled));
  const isDue = $("pulls").open || [...rows.values()].some(({ state }) => state === "downloading");
  clearTimeout(timer); // of another look
  if (isDue) timer = setTimeout(look, PAUSE_MS);
}

function show(models) {
  for (const [id, { node }] of rows) if (!models.some((one) => one.id === id)) rows.delete(id), node.remove();
  for (const model of models) {
    if (!rows.has(model.id)) rows.set(model.id, new Row(model.id));
    rows.get(model.id).show(model.status);
  }
  $("pulled").append(...[...rows.values()].map(({ node }) => node).filter(({ parentNode }) => !parentNode));
}

const STATES = ["downloading", "stopped", "failed"]; // of what is not here yet

class Row {
  constructor(id) {
    this.id = id;
    this.words = el("span", { class: "soft" });
    this.bar = el("progress", { "aria-label": `Download of ${id}` });
    this.acts = el("span", { class: "row" });
    this.node = el("li", {}, el("strong", { class: "name" }, id), this.words, this.bar, this.acts);
  }

  show(status) {
    const state = status.failed ? "failed" : STATES.includes(status.value) ? status.value : "here";
    if (state === "here" && this.state === "downloading") acts.came(toast(`${this.id} is here.`));
    this.words.textContent = this.told(state, status);
    this.words.className = state === "failed" ? "trouble" : "soft";
    const { bytes_done: done, bytes_total: total } = status;
    this.bar.hidden = state === "here" || (!total && state !== "downloading");
    if (total) Object.assign(this.bar, { max: total, value: done });
    else this.bar.removeAttribute("value");
    if (state !== this.state) this.acts.replaceChildren(...this.buttons(state));
    this.state = state;
  }

  told(state, { bytes_done: done, bytes_total: total, bytes_per_s: pace, seconds_left: left, error }) {
    const size = total ? `${bytes(done)} of ${bytes(total)}` : "";
    if (state === "here") return "Here";
    if (state === "failed") return error?.message ?? "It could not be downloaded.";
    if (state === "stopped") return `Stopped${size && ` at ${size}`}; what has come is kept`;
    return [size || "Asking the hub", pace && `${bytes(pace)}/s`, left != null && `${duration(left)} left`].filter(Boolean).join(" · ");
  }

  buttons(state) {
    const { id } = this;
    const named = (words, act, more) => button(words, act, { "aria-label": `${words} ${id}`, ...more });
    const last = state === "downloading" ? named("Stop", () => stop(id)) : named("Remove", () => remove(id));
    const first = { here: named("Use", () => ($("pulls").close(), acts.use(id)), { class: "primary" }), downloading: null }[state];
    return [first === undefined ? named("Go on", () => begin(id)) : first, last].filter(Boolean);
  }
}

// `use` is called with the name of a model to speak to; `came` when one has come.
export function openDownloads({ use, came }) {
  acts = { use, came };
  $("pull-fault").textContent = "";
  $("pulls").showModal();
  look();
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
