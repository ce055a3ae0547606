// The dashboard: the management stream as figures, a timeline of steps and a histogram of gaps.

import { ask, errorOf, events, isAdminKeyTaken, useAdminKey } from "./api.js";
import { drawGaps, drawSteps } from "./charts.js";
import { el } from "./dom.js";
import { isLoading, lookAtLoad, showLoad } from "./loading.js";
import { inCells, lookAtRates, rateOf, seenGateways, showTiles } from "./rates.js";
import { saveSettings } from "./settings.js";
import { runTrial } from "./trial.js";

const $ = (id) => document.getElementById(id);
const MAX_STEPS = 300;
const MAX_ROWS = 50;
const LOOK_MS = 2000;
const SILENCE_MS = 30_000; // three heartbeats
let steps = []; // [number, step], oldest first
let state = null;
let connection = null; // that the figures come by
let isTrying = false;

const rest = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

async function watch() {
  let silence = 0;
  const heard = () => {
    clearTimeout(silence);
    silence = setTimeout(() => connection.abort(), SILENCE_MS);
  };
  for (let pause = 250; ; pause = Math.min(pause * 2, 5000)) {
    try {
      connection = new AbortController();
      heard();
      const response = await ask("/manage/stream", { signal: connection.signal });
      if (response.ok) {
        $("news").textContent = "";
        showWhole(true);
        for await (const { event, data } of events(response, () => (heard(), (pause = 250)))) if (event === "state") take(JSON.parse(data));
        $("news").textContent = "The connection ended; trying again.";
      } else if ([401, 403].includes(response.status)) {
        await askForKey((await errorOf(response)).message);
        pause = 250;
      } else {
        $("news").textContent = (await errorOf(response)).message;
      }
    } catch {
      $("news").textContent = "The server cannot be reached; trying again.";
    }
    $("try").disabled = true;
    await rest(pause);
  }
}

// Figures, and what can be done here: nothing of it without the key.
function showWhole(isOpen) {
  $("all").hidden = $("try").hidden = !isOpen;
  $("key").hidden = isOpen;
}

// Until one was given; for good, where the server has none.
async function askForKey(reason) {
  showWhole(false);
  $("news").textContent = "";
  $("key-fault").textContent = reason;
  $("key").querySelector(".row").hidden = !(await isAdminKeyTaken());
  await new Promise((resolve) => {
    $("key").onsubmit = (event) => {
      event.preventDefault();
      saveSettings({ adminKey: $("key").querySelector("input").value.trim() });
      resolve();
    };
  });
}

// What the stream does not tell: rates, and how far a load is.
async function look() {
  for (;; await rest(state ? LOOK_MS : 100)) {
    if (document.hidden || !state || $("all").hidden) continue;
    if (state.state === "loading" || isLoading()) await lookAtLoad();
    showLoad($("loading"));
    await lookAtRates($("which").value).catch(() => {}); // the stream says that the server is away
    showRates();
  }
}

// A snapshot holds the last steps; older ones are kept here, by their numbers.
function take(snapshot) {
  const isRestart = state && (snapshot.num_steps < state.num_steps || snapshot.engine.pid !== state.engine.pid);
  if (isRestart) steps = [];
  const first = snapshot.num_steps - snapshot.steps.length;
  const last = steps.at(-1)?.[0] ?? -1;
  snapshot.steps.forEach((step, k) => first + k > last && steps.push([first + k, step]));
  steps = steps.slice(-MAX_STEPS);
  state = snapshot;
  $("try").disabled = isTrying || !["ok", "recovering"].includes(state.state);
  if (state.state !== "loading") $("loading").hidden = true;
  show();
  showModels();
  showReplicas();
  showRequests();
}

function fill(table, rows) {
  table.tBodies[0].replaceChildren(...rows.map((cells) => el("tr", {}, ...cells.map((cell) => el("td", {}, cell)))));
}

function showRates() {
  showTiles($("live"));
  showModels();
  const gateways = seenGateways();
  $("gateways").hidden = !gateways.length;
  fill($("gateways").querySelector("table"), gateways.map((one) => [one.is_this ? `${one.name} (this one)` : one.name, one.state, String(one.streams), ...inCells(one.live)]));
}

function showModels() {
  const { models = [] } = state;
  $("models").hidden = !models.length;
  fill($("models").querySelector("table"), models.map((one) => [one.model, one.status.failed ? "failed" : one.status.value, String(one.running), String(one.waiting.requests), String(one.num_steps), ...inCells(rateOf(one.model))]));
  const known = [...$("which").options].slice(1).map(({ value }) => value);
  $("of").hidden = models.length < 2;
  if (known.join("\n") !== models.map(({ model }) => model).join("\n")) {
    const chosen = $("which").value;
    $("which").replaceChildren($("which").options[0], ...models.map(({ model }) => el("option", { value: model, selected: model === chosen }, model)));
  }
}

// The engines of each model that has several, or whose engines may be on other machines.
function showReplicas() {
  const { models = [state] } = state;
  const rows = models.flatMap(({ model, replicas = [] }) => replicas.map((one) => [model, String(one.number), one.state, one.node || "this one", `${one.taken} of ${one.places}`, String(one.starts)]));
  $("replicas").hidden = !rows.length;
  fill($("replicas").querySelector("table"), rows);
}

// Those that wait, too, in the order in which they came.
function showRequests() {
  const { models = [state], requests } = state;
  const sum = (value) => models.reduce((sofar, one) => sofar + (value(one) ?? 0), 0);
  const waiting = sum((one) => one.waiting.requests);
  const tokens = sum((one) => one.waiting.tokens);
  const places = `${sum((one) => one.running)} of ${sum((one) => one.engine.max_num_seqs)} places are taken`;
  const more = requests.length > MAX_ROWS ? ` The first ${MAX_ROWS} are shown.` : "";
  $("requests-text").textContent = `${places}${waiting ? `; ${waiting} with ${tokens} prompt tokens wait` : ""}.${more}`;
  $("requests").hidden = !requests.length;
  fill($("requests"), requests.slice(0, MAX_ROWS).map(asRow));
}

const STATES = { queued: "waits", prompt: "reads its prompt", decode: "answers", recovering: "is recovered" };

function asRow(request) {
  const { number, model, prompt_tokens: total, prompt_processed: done, tokens, tokens_left: left } = request;
  const bar = el("progress", { max: Math.max(total, 1), value: done, "aria-label": `Prompt of request ${number}` });
  const prompt = el("span", { class: "progress" }, bar, `${done} of ${total} tokens`);
  const answer = `${tokens} tokens${left === null ? "" : `, at most ${left} more`}`;
  const is = request.state === "queued" && done ? "prompt" : request.state; // its log may not tell
  return [String(number), model, STATES[is] ?? is, prompt, String(request.prompt_cached), answer, `${Math.round(request.max_gap_ms)} ms`];
}

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

// The memory of the model that has the least left: [share, figures].
function memory(models) {
  const shares = models.flatMap(({ blocks, slots }) => Object.entries({ blocks, slots })).filter(([, one]) => one?.total);
  const found = shares.map(([name, { total, free }]) => [(total - free) / total, `${total - free} of ${total} ${name}`]);
  const [share, figures] = found.sort(([one], [other]) => other - one)[0] ?? [];
  return found.length ? [`${Math.round(100 * share)} %`, figures] : ["–", "none yet"];
}

function showFigures() {
  const { models = [state] } = state;
  const sum = (value) => models.reduce((sofar, one) => sofar + (value(one) ?? 0), 0);
  const restarts = sum(({ engine }) => Math.max(engine.starts - 1, 0));
  const figures = {
    State: [state.state, plural(restarts, "engine restart")],
    Running: [sum((one) => one.running), `of ${plural(sum((one) => one.engine.max_num_seqs), "place")}`],
    Waiting: [sum((one) => one.waiting.requests), plural(sum((one) => one.waiting.tokens), "prompt token")],
    "Memory used": memory(models),
    "Guessed right": [sum(({ guessed }) => guessed?.accepted), `of ${plural(sum(({ guessed }) => guessed?.tokens), "token")} guessed`],
    "Stall targets missed": [sum(({ missed }) => Object.values(missed).reduce((a, b) => a + b, 0)), `in ${plural(sum((one) => one.num_steps), "step")}`],
  };
  $("figures").replaceChildren(...Object.entries(figures).map(([name, [value, note]]) => el("div", {}, el("dt", {}, name), el("dd", { "data-name": name }, String(value)), el("dd", { class: "soft" }, note))));
  const { lane, device, dtype, max_model_len: context, stall_target_ms: target } = state.engine;
  const facts = [state.model, lane && `lane ${lane}`, device, dtype, context && `context ${context}`, lane && (target === null ? "no stall target" : `stall target ${target} ms`)];
  $("facts").textContent = state.models ? plural(models.length, "model") : facts.filter(Boolean).join(" · ");
}

function show() {
  showFigures();
  const { engine } = state;
  const ofWhich = state.models ? ` of ${state.model}` : "";
  $("steps-title").textContent = `Steps${ofWhich}`;
  $("gaps-title").textContent = `Gaps${ofWhich}`;
  const shown = steps.map(([, step]) => step);
  const gaps = shown.filter((step) => step.decoding).map((step) => step.elapsed_ms).sort((a, b) => a - b);
  drawSteps($("steps"), shown, engine.stall_target_ms);
  drawGaps($("gaps"), gaps, engine.stall_target_ms);
  const longest = Math.max(0, ...shown.map((step) => step.actual_ms));
  const largest = Math.max(0, ...shown.map((step) => step.prompt_tokens));
  $("steps-text").textContent = shown.length ? `${shown.length} steps; the longest took ${longest.toFixed(0)} ms, the largest had ${largest} prompt tokens.` : "No step yet.";
  const at = (share) => gaps[Math.min(gaps.length - 1, Math.floor(share * gaps.length))].toFixed(0);
  $("gaps-text").textContent = gaps.length ? `${gaps.length} gaps; half within ${at(0.5)} ms, 99 % within ${at(0.99)} ms, the longest ${at(1)} ms.` : "No gap yet.";
}

$("try").addEventListener("click", async () => {
  $("try").disabled = isTrying = true;
  $("trial").hidden = false;
  try {
    await runTrial($("rows"), state?.engine?.max_model_len ?? 2048);
  } catch (error) {
    $("news").textContent = error.message;
  }
  $("try").disabled = isTrying = false;
});
$("which").addEventListener("change", async () => {
  await lookAtRates($("which").value).catch(() => {});
  showRates();
});
const redraw = () => state && (show(), showTiles($("live")));
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("pagehide", () => connection.abort()); // a page that may be shown again would keep it
useAdminKey();
watch();
look();
