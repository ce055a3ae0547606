// Four streams, and a long prompt beside them: what the promise "never stalled" is about.

import { ask, errorOf, events } from "./api.js";
import { el } from "./dom.js";

const NUM_STREAMS = 4;
const HEAD_START_MS = 1000;

export async function runTrial(rows, maxLength) {
  rows.replaceChildren();
  const streams = Array.from({ length: NUM_STREAMS }, (_, k) =>
    one(rows, `Stream ${k + 1}`, { messages: [{ role: "user", content: "Count from 1 to 300." }], max_tokens: 1000, ignore_eos: true }),
  );
  await new Promise((resolve) => setTimeout(resolve, HEAD_START_MS));
  const prompt = await longPrompt(Math.min(2000, Math.floor(0.7 * maxLength)));
  await Promise.all([...streams, one(rows, "Long prompt", { prompt, max_tokens: 8 }, "/v1/completions")]);
}

// About so many tokens, and never the same ones, so that none are cached.
async function longPrompt(numTokens) {
  const numbers = (count) => Array.from({ length: count }, () => Math.floor(1000 * Math.random())).join(" ");
  const sample = numbers(100);
  const response = await ask("/tokenize", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ content: sample }) });
  if (!response.ok) throw new Error((await errorOf(response)).message);
  const { count } = await response.json();
  return numbers(Math.floor((100 * numTokens) / count));
}

async function one(rows, name, fields, path = "/v1/chat/completions") {
  const bar = el("progress", { max: 1, value: 0, "aria-label": name });
  const said = el("span", {}, "sent");
  rows.append(el("div", { class: "status" }, el("strong", {}, name), said, bar));
  const body = JSON.stringify({ ...fields, stream: true, return_progress: true, timings_per_token: true });
  const response = await ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body });
  if (!response.ok) return void (said.textContent = (await errorOf(response)).message);
  for await (const { data } of events(response)) {
    if (data === "[DONE]") break;
    const { error, queue, prompt_progress: prompt, timings } = JSON.parse(data);
    if (error) said.textContent = error.message;
    if (queue) said.textContent = `place ${queue.position} of ${queue.waiting} in the queue`;
    if (prompt) {
      [bar.max, bar.value] = [prompt.total, prompt.processed];
      said.textContent = `prompt: ${prompt.processed} of ${prompt.total} tokens`;
    } else if (timings) {
      [bar.max, bar.value] = [fields.max_tokens, timings.predicted_n];
      said.textContent = `${timings.predicted_n} tokens, longest gap ${Math.round(timings.max_gap_ms ?? 0)} ms`;
    }
  }
  bar.value = bar.max;
}
