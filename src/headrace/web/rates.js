// Shows the current rates and waits as tiles, each with a chart of the last hour, as the server has counted them.

import { ask } from "./api.js";
import { drawHour } from "./charts.js";
import { el } from "./dom.js";

const HOUR_MS = 10_000; // milliseconds between two requests for the last hour
let live = null;
let hour = null;
let gateways = [];
let hourAt = -HOUR_MS;
// The model whose last hour is shown.
let shownOf = null;

const rounded = (value) => (value < 10 ? String(Number(value.toFixed(1))) : value.toFixed(0));
const time = (ms) => (ms < 1 ? "< 1 ms" : ms < 10 ? `${rounded(ms)} ms` : ms < 1000 ? `${ms.toFixed(0)} ms` : `${rounded(ms / 1000)} s`);
const share = (value) => `${Math.round(100 * value)} %`;
const ninetyNine = (name) => (it) => `99 % within ${time(it[`${name}_p99_ms`])}`;

// Each tile: title, name of the figure, its text, a note, and the figures that the chart shows.
const TILES = [
  ["Tokens out", "tokens_out_per_s", (value) => `${rounded(value)}/s`, () => "answers, last 10 s", ["tokens_out_per_s"]],
  ["Tokens in", "tokens_in_per_s", (value) => `${rounded(value)}/s`, () => "prompts processed, last 10 s", ["tokens_in_per_s"]],
  ["Time to first token", "ttft_p50_ms", time, ninetyNine("ttft"), ["ttft_p50_ms", "ttft_p99_ms"]],
  ["Gaps", "gap_p50_ms", time, ninetyNine("gap"), ["gap_p50_ms", "gap_p99_ms"]],
  ["Time in the queue", "queue_p50_ms", time, ninetyNine("queue"), ["queue_p50_ms", "queue_p99_ms"]],
  ["Cache hits", "cached_share", share, () => "of prompt tokens, last minute", ["cached_share"]],
];

// Fetches the figures of one model, or of all models if the name is empty.
export async function lookAtRates(model = "") {
  const query = model && `?model=${encodeURIComponent(model)}`;
  const response = await ask(`/manage/live${query}`);
  if (!response.ok) return;
  const found = await response.json();
  [live, gateways] = [found.live, found.gateways];
  for (const one of found.models) rates.set(one.model, one);
  if (performance.now() - hourAt < HOUR_MS && shownOf === model) return;
  const answer = await ask(`/manage/history${query}`);
  if (!answer.ok) return;
  hour = await answer.json();
  [hourAt, shownOf] = [performance.now(), model];
}

// By model.
const rates = new Map();

export const rateOf = (model) => rates.get(model);
export const seenGateways = () => gateways;

// Returns the cells of a table's row for tokens out and in, first token and gaps. An older server sends none of
// them.
export function inCells(of) {
  const cell = (name, inWords) => (of?.[name] == null ? "–" : inWords(of[name]));
  const rate = (value) => `${rounded(value)}/s`;
  return [cell("tokens_out_per_s", rate), cell("tokens_in_per_s", rate), cell("ttft_p50_ms", time), cell("gap_p99_ms", time)];
}

export function showTiles(box) {
  if (!box.children.length) box.append(...TILES.map(makeTile));
  TILES.forEach(([title, name, inWords, note, lines], k) => {
    const [, value, under, high, { firstChild: canvas }] = box.children[k].children;
    const now = live?.[name] ?? null;
    value.textContent = now === null ? "–" : inWords(now);
    const shown = lines.at(-1);
    const points = hour?.points ?? [];
    const most = Math.max(-1, ...[live, ...points].map((point) => point?.[shown] ?? -1));
    const isDrawn = points.some((point) => point[shown]);
    under.textContent = live === null ? "not measured yet" : now !== null ? note(live) : `none in the last ${hour && most < 0 ? "hour" : "minute"}`;
    high.textContent = isDrawn || most === 0 ? `${lines.length > 1 ? "99 %: " : ""}max ${inWords(most)} in the last hour` : "collecting the last hour";
    high.hidden = !hour || most < 0;
    canvas.hidden = !isDrawn;
    if (isDrawn) drawHour(canvas, hour, lines, most);
    canvas.setAttribute("aria-label", `${title} in the last hour: at most ${inWords(most)}`);
  });
}

function makeTile([title]) {
  const canvas = el("canvas", { role: "img", "aria-label": `${title} in the last hour` });
  return el("div", {}, el("dt", {}, title), el("dd", { "data-name": title }), el("dd", { class: "soft" }), el("dd", { class: "soft" }), el("dd", {}, canvas));
}
