// The dashboard: the management stream as figures, a timeline of steps and a histogram of gaps.

import { ask, errorOf, events } from "./api.js";
import { drawGaps, drawSteps } from "./charts.js";
import { el } from "./dom.js";
import { runTrial } from "./trial.js";

const $ = (id) => document.getElementById(id);
const MAX_STEPS = 300;
const MAX_ROWS = 50;
let steps = []; // [number, step], oldest first
let state = null;

async function watch() {
  for (let pause = 250; ; pause = Math.min(pause * 2, 5000)) {
    try {
      const response = await ask("/manage/stream");
      if (response.ok) {
        $("news").textContent = "";
        for await (const { event, data } of events(response, () => (pause = 250))) if (event === "state") take(JSON.parse(data));
        $("news").textContent = "The connection ended; trying again.";
      } else {
        const hint = response.status === 401 ? " Enter it in the chat's settings." : "";
        $("news").textContent = (await errorOf(response)).message + hint;
      }
    } catch {
      $("news").textContent = "The server cannot be reached; trying again.";
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
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
  show();
  showModels();
  showReplicas();
  showRequests();
}

function fill(table, rows) {
  table.tBodies[0].replaceChildren(...rows.map((cells) => el("tr", {}, ...cells.map((cell) => el("td", {}, cell)))));
}

function showModels() {
  const { models = [] } = state;
  $("models").hidden = !models.length;
  fill($("models").querySelector("table"), models.map((one) => [one.model, one.status.failed ? "failed" : one.status.value, String(one.running), String(one.waiting.requests), String(one.num_steps)]));
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

function show() {
  const { engine, waiting, blocks, slots } = state;
  const used = (memory) => (memory?.total ? `${memory.total - memory.free} of ${memory.total}` : "none");
  const figures = {
    State: state.state, Model: state.model, Lane: engine.lane ?? "–", Device: engine.device ?? "–",
    Running: state.running, Waiting: `${waiting.requests} (${waiting.tokens} tokens)`,
    "Blocks used": used(blocks), "Slots used": used(slots), "Engine restarts": Math.max(engine.starts - 1, 0),
    Steps: state.num_steps, "Stall target": engine.stall_target_ms == null ? "none" : `${engine.stall_target_ms} ms`,
    "Targets missed": Object.values(state.missed).reduce((sum, one) => sum + one, 0),
  };
  $("figures").replaceChildren(...Object.entries(figures).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", { "data-name": name }, String(value)))));
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
  $("try").disabled = true;
  $("trial").hidden = false;
  try {
    await runTrial($("rows"), state?.engine?.max_model_len ?? 2048);
  } catch (error) {
    $("news").textContent = error.message;
  }
  $("try").disabled = false;
});
addEventListener("resize", () => state && show());
watch();
