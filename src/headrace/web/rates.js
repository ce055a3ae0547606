// Rates and waits of the last moments, from the counters of /metrics as they were a while ago.

import { ask } from "./api.js";

const RATE_MS = 10_000;
const WAIT_MS = 60_000;
const COUNTER = /^headrace_(ttft|queue|inter_token)_seconds_(sum|count)(?:\{.*\})? (\S+)$/gm;
let samples = []; // {at, ttft_sum, ...}, oldest first; sums over the models

export async function lookAtRates() {
  const response = await ask("/metrics");
  if (!response.ok) return;
  const sample = { at: performance.now() };
  for (const [, name, part, value] of (await response.text()).matchAll(COUNTER)) {
    sample[`${name}_${part}`] = (sample[`${name}_${part}`] ?? 0) + Number(value);
  }
  if (tokens(sample) < tokens(samples.at(-1))) samples = []; // another server
  samples = [...samples.filter(({ at }) => sample.at - at < 2 * WAIT_MS), sample];
}

const tokens = (sample) => (sample ? sample.ttft_count + sample.inter_token_count : 0);

// The newest sample and the last one that is so old, or the oldest there is.
function span(milliseconds) {
  const now = samples.at(-1);
  return [now, samples.findLast(({ at }) => now.at - at >= milliseconds) ?? samples[0]];
}

// Tokens that left, by the second: [figure, note].
export function tokenRate() {
  const [now, before] = samples.length ? span(RATE_MS) : [];
  const seconds = samples.length && (now.at - before.at) / 1000;
  if (seconds < 1) return ["–", "not measured yet"];
  const rate = (tokens(now) - tokens(before)) / seconds;
  return [rate < 10 ? String(Number(rate.toFixed(1))) : rate.toFixed(0), `in the last ${seconds.toFixed(0)} s`];
}

// The mean of a histogram over the last minute; where nothing came then, since the start.
export function meanWait(name) {
  if (!samples.length) return ["–", "not measured yet"];
  const [now, before] = span(WAIT_MS);
  const mean = (sum, count, when) => [inUnits(sum / count), `mean of ${count} ${when}`];
  const count = now[`${name}_count`] - before[`${name}_count`];
  if (count) return mean(now[`${name}_sum`] - before[`${name}_sum`], count, "in the last minute");
  return now[`${name}_count`] ? mean(now[`${name}_sum`], now[`${name}_count`], "since the start") : ["–", "no request yet"];
}

const inUnits = (seconds) => (seconds < 1 ? `${(1000 * seconds).toFixed(0)} ms` : `${seconds.toFixed(1)} s`);
