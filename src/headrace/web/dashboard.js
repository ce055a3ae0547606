// The dashboard: shows the state stream as figures, a timeline of steps and a histogram of gaps.

import { ask, errorOf, events, isAdminKeyTaken, useAdminKey } from "./api.js";
import { drawGaps, drawSteps } from "./charts.js";
import { el } from "./dom.js";
import { isLoading, lookAtLoad, showLoad } from "./loading.js";
import { inCells, lookAtRates, rateOf, seenGateways, showTiles } from "./rates.js";
import { saveSettings } from "./settings.js";
import { planOf, runTrial } from "./trial.js";

const $ = (id) => document.getElementById(id);
const MAX_STEPS = 300;
const MAX_ROWS = 50;
const LOOK_MS = 2000;
const SILENCE_MS = 30_000; // three heartbeats, in milliseconds
let steps = []; // pairs of [number, step], oldest first
let state = null;
// The connection that receives the state.
let connection = null;
// Stops the load test while it is running.
let trial = null;

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
    $("try").disabled = !trial;
    await rest(pause);
  }
}

// Shows the figures and the actions, or else only the form for the key.
function showWhole(isOpen) {
  $("all").hidden = $("try").hidden = !isOpen;
  $("key").hidden = isOpen;
}

// Waits until the person has given a key. If the server has no admin key, this waits forever.
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

// Fetches what the state stream lacks: rates and load progress.
async function look() {
  for (;; await rest(state ? LOOK_MS : 100)) {
    if (document.hidden || !state || $("all").hidden) continue;
    if (state.state === "loading" || isLoading()) await lookAtLoad();
    showLoad($("loading"));
    // If the server is away, `watch` reports it.
    await lookAtRates($("which").value).catch(() => {});
    showRates();
  }
}

// A snapshot holds the last steps. Older steps are kept here, by their numbers.
function take(snapshot) {
  const isRestart = state && (snapshot.num_steps < state.num_steps || snapshot.engine.pid !== state.engine.pid);
  if (isRestart) steps = [];
  const first = snapshot.num_steps - snapshot.steps.length;
  const last = steps.at(-1)?.[0] ?? -1;
  snapshot.steps.forEach((step, k) => first + k > last && steps.push([first + k, step]));
  steps = steps.slice(-MAX_STEPS);
  state = snapshot;
  $("try").disabled = !trial && !["ok", "recovering"].includes(state.state);
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
  fill($("gateways").querySelector("table"), gateways.map((one) => [one.is_this ? `${one.name} (this server)` : one.name, one.state, String(one.streams), ...inCells(one.live)]));
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

// Shows the engines of each model that has several, or whose engines may be on other machines.
function showReplicas() {
  const { models = [state] } = state;
  const rows = models.flatMap(({ model, replicas = [] }) => replicas.map((one) => [model, String(one.number), one.state, one.node || "this machine", `${one.taken} of ${one.places}`, String(one.starts)]));
  $("replicas").hidden = !rows.length;
  fill($("replicas").querySelector("table"), rows);
}

// Shows running and waiting requests, in the order in which they arrived.
function showRequests() {
  const { requests } = state;
  const waiting = sum((one) => one.waiting.requests);
  const tokens = sum((one) => one.waiting.tokens);
  const running = `${sum((one) => one.running)} of at most ${sum((one) => one.engine.max_num_seqs)} sequences are running`;
  const more = requests.length > MAX_ROWS ? ` The first ${MAX_ROWS} are shown.` : "";
  $("requests-text").textContent = `${running}${waiting ? `; ${waiting} with ${tokens} prompt tokens wait` : ""}.${more}`;
  $("requests").parentElement.hidden = !requests.length;
  fill($("requests"), requests.slice(0, MAX_ROWS).map(asRow));
}

const STATES = { queued: "waiting", prompt: "processing its prompt", decode: "answering", recovering: "recovering" };

function asRow(request) {
  const { number, model, prompt_tokens: total, prompt_processed: done, tokens, tokens_left: left } = request;
  const bar = el("progress", { max: Math.max(total, 1), value: done, "aria-label": `Prompt of request ${number}` });
  const prompt = el("span", { class: "progress" }, bar, `${done} of ${total} tokens`);
  const answer = `${tokens} tokens${left === null ? "" : `, at most ${left} more`}`;
  // The stream's log may not show yet that the prompt has started.
  const is = request.state === "queued" && done ? "prompt" : request.state;
  return [String(number), STATES[is] ?? is, prompt, answer, `${Math.round(request.max_gap_ms)} ms`, String(request.prompt_cached), model];
}

// Adds up a value of all models.
const sum = (value) => (state.models ?? [state]).reduce((total, one) => total + (value(one) ?? 0), 0);

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

// Returns [share, figures] of the model whose cache has the least room left.
function cache(models) {
  const shares = models.flatMap(({ blocks, slots }) => Object.entries({ blocks, slots })).filter(([, one]) => one?.total);
  const found = shares.map(([name, { total, free }]) => [(total - free) / total, `${total - free} of ${total} ${name}`]);
  const [share, figures] = found.sort(([one], [other]) => other - one)[0] ?? [];
  return found.length ? [`${Math.round(100 * share)} %`, figures] : ["–", "none yet"];
}

function showFigures() {
  const { models = [state] } = state;
  const restarts = sum(({ engine }) => Math.max(engine.starts - 1, 0));
  const figures = {
    State: [state.state, plural(restarts, "engine restart")],
    Running: [sum((one) => one.running), `of ${plural(sum((one) => one.engine.max_num_seqs), "sequence")} at most`],
    Waiting: [sum((one) => one.waiting.requests), plural(sum((one) => one.waiting.tokens), "prompt token")],
    "KV cache used": cache(models),
    "Guesses accepted": [sum(({ guessed }) => guessed?.accepted), `of ${plural(sum(({ guessed }) => guessed?.tokens), "token")} guessed`],
    "Stall targets missed": [sum(({ missed }) => Object.values(missed).reduce((a, b) => a + b, 0)), `in ${plural(sum((one) => one.num_steps), "step")}`],
  };
  $("figures").replaceChildren(...Object.entries(figures).map(([name, [value, note]]) => el("div", {}, el("dt", {}, name), el("dd", { "data-name": name }, String(value)), el("dd", { class: "soft" }, note))));
  const { lane, device, dtype, max_model_len: context, stall_target_ms: target, stall_target_reason: reason } = state.engine;
  const facts = [state.model, lane && `lane ${lane}`, device, dtype, context && `context ${context.toLocaleString("en")}`, lane && (target === null ? "no stall target" : `stall target ${target} ms (${reason})`)];
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
  $("steps").hidden = !shown.length;
  $("gaps").hidden = !gaps.length;
  drawSteps($("steps"), shown, engine.stall_target_ms);
  drawGaps($("gaps"), gaps, engine.stall_target_ms);
  const longest = Math.max(0, ...shown.map((step) => step.actual_ms));
  const largest = Math.max(0, ...shown.map((step) => step.prompt_tokens));
  $("steps-text").textContent = shown.length ? `${shown.length} steps; the longest took ${longest.toFixed(0)} ms, the largest had ${largest} prompt tokens.` : "No step yet.";
  const at = (share) => gaps[Math.min(gaps.length - 1, Math.floor(share * gaps.length))].toFixed(0);
  $("gaps-text").textContent = gaps.length ? `${gaps.length} gaps; half within ${at(0.5)} ms, 99 % within ${at(0.99)} ms, the longest ${at(1)} ms.` : "No gap yet.";
}

// Returns the name and the context length of the model that the load test uses.
function tested() {
  const model = $("which").value || state.model;
  const { engine } = (state.models ?? []).find((one) => one.model === model) ?? state;
  return [model, engine?.max_model_len ?? 2048];
}

function askForTrial() {
  $("plan").textContent = planOf(...tested());
  $("now").textContent = `Now: ${plural(sum((one) => one.running), "sequence")} running, ${plural(sum((one) => one.waiting.requests), "request")} waiting.`;
  $("ask").returnValue = "";
  $("ask").showModal();
}

async function tryOut() {
  trial = new AbortController();
  $("try").textContent = "Stop the load test";
  $("trial").hidden = false;
  try {
    await runTrial($("rows"), ...tested(), trial);
  } catch (error) {
    $("news").textContent = error.message;
  }
  trial = null;
  $("try").textContent = "Load test…";
}

$("try").addEventListener("click", () => (trial ? trial.abort() : askForTrial()));
$("ask").addEventListener("close", () => $("ask").returnValue === "run" && tryOut());
$("which").addEventListener("change", async () => {
  await lookAtRates($("which").value).catch(() => {});
  showRates();
});
const redraw = () => state && (show(), showTiles($("live")));
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
// The browser may show this page again later; until then, its connection would stay open.
addEventListener("pagehide", () => connection.abort());
useAdminKey();
watch();
look();
