// Shows in one line what an answer took.

import { duration, el } from "./dom.js";

const brief = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : duration(ms / 1000));

// Returns each figure as [short text, explanation].
function figuresOf({ timings }) {
  const { predicted_n: num, predicted_per_second: rate, queue_ms: queued = 0, prompt_ms: read, prompt_n: prompt, cache_n: cached, max_gap_ms: gap } = timings;
  const all = [[`${num} token${num === 1 ? "" : "s"}`, "Tokens of the answer"]];
  if (rate) all.push([`${rate.toFixed(1)} tokens/s`, "From the first token to the last"]);
  if (read !== undefined) all.push([`first after ${brief(queued + read)}`, `Time to the first token: ${brief(queued)} in the queue, ${brief(read)} for the prompt`]);
  if (gap) all.push([`longest gap ${brief(gap)}`, "The longest time between two tokens"]);
  if (cached) all.push([`${Math.floor((100 * cached) / (cached + prompt))} % cached`, `${cached} of the prompt's ${cached + prompt} tokens were in the cache`]);
  return all;
}

export function figures(message) {
  if (!message.timings?.predicted_n) return [];
  return [el("span", { class: "took" }, ...figuresOf(message).map(([words, meaning]) => el("span", { title: meaning }, words)))];
}
