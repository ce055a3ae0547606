// Runs four streams, and a long prompt beside them, to show what the promise "never stalled" means.

import { ask, errorOf, events, post } from "./api.js";
import { el } from "./dom.js";

const NUM_STREAMS = 4;
const MAX_TOKENS = 1000;
const HEAD_START_MS = 1000;
const MAX_MINUTES = 2;

const promptLength = (maxLength) => Math.min(2000, Math.floor(0.7 * maxLength));

// Says what the test sends, before it is sent.
export const planOf = (model, maxLength) =>
  `The test sends ${NUM_STREAMS + 1} requests to ${model}: ${NUM_STREAMS} streams of up to ${MAX_TOKENS.toLocaleString("en")} tokens each, and one second later a new prompt of about ${promptLength(maxLength).toLocaleString("en")} tokens. It ends after at most ${MAX_MINUTES} minutes, and you can stop it at any time.`;

// Runs the test, until `stop` is aborted or the time is over.
export async function runTrial(rows, model, maxLength, stop) {
  rows.replaceChildren();
  const timer = setTimeout(() => stop.abort(), MAX_MINUTES * 60_000);
  const send = (name, fields, path) => one(rows, name, { model, ...fields }, path, stop.signal);
  const count = { messages: [{ role: "user", content: "Count from 1 to 300." }], max_tokens: MAX_TOKENS, ignore_eos: true };
  try {
    const streams = Array.from({ length: NUM_STREAMS }, (_, k) => send(`Stream ${k + 1}`, count, "/v1/chat/completions"));
    await new Promise((resolve) => setTimeout(resolve, HEAD_START_MS));
    const prompt = await longPrompt(model, promptLength(maxLength));
    await Promise.all([...streams, send("Long prompt", { prompt, max_tokens: 8 }, "/v1/completions")]);
  } finally {
    stop.abort();
    clearTimeout(timer);
  }
}

// Returns a prompt of about that many tokens. It is different each time, so that nothing is cached.
async function longPrompt(model, numTokens) {
  const numbers = (count) => Array.from({ length: count }, () => Math.floor(1000 * Math.random())).join(" ");
  const sample = numbers(100);
  const response = await post("/tokenize", { model, content: sample });
  if (!response.ok) throw new Error((await errorOf(response)).message);
  const { count } = await response.json();
  return numbers(Math.floor((100 * numTokens) / count));
}

async function one(rows, name, fields, path, signal) {
  const bar = el("progress", { max: 1, value: 0, "aria-label": name });
  const said = el("span", {}, "sent");
  rows.append(el("div", { class: "status" }, el("strong", {}, name), said, bar));
  let stream = null;
  try {
    const response = await post(path, { ...fields, stream: true, return_progress: true, timings_per_token: true }, signal);
    if (!response.ok) return void (said.textContent = (await errorOf(response)).message);
    stream = response.headers.get("X-Stream-Id");
    await show(response, bar, said, fields.max_tokens);
    bar.value = bar.max;
  } catch (error) {
    said.textContent = signal.aborted ? `stopped; ${said.textContent}` : error.message;
    // Without this request, the server would keep the stream running for a reader that may come back.
    if (stream) ask(`/v1/streams/${encodeURIComponent(stream)}`, { method: "DELETE" }).catch(() => {});
  }
}

async function show(response, bar, said, maxTokens) {
  for await (const { data } of events(response)) {
    if (data === "[DONE]") return;
    const { error, queue, prompt_progress: prompt, timings } = JSON.parse(data);
    if (error) said.textContent = error.message;
    if (queue) said.textContent = `position ${queue.position} of ${queue.waiting} in the queue`;
    if (prompt) {
      [bar.max, bar.value] = [prompt.total, prompt.processed];
      said.textContent = `prompt: ${prompt.processed} of ${prompt.total} tokens`;
    } else if (timings) {
      [bar.max, bar.value] = [maxTokens, timings.predicted_n];
      said.textContent = `${timings.predicted_n} tokens, longest gap ${Math.round(timings.max_gap_ms ?? 0)} ms`;
    }
  }
}
