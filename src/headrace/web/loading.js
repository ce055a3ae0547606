// What the server does while it loads its only model, as /health reports it.

import { ask } from "./api.js";
import { el } from "./dom.js";

const LONGEST_MS = 10_000; // milliseconds to wait for an answer
let load = null;
let asked = null;

export const isLoading = () => load !== null;

// Asks the server, unless a request is running already. Returns whether the server answered.
export function lookAtLoad() {
  asked ??= look().finally(() => (asked = null));
  return asked;
}

async function look() {
  try {
    const response = await ask("/health", { signal: AbortSignal.timeout(LONGEST_MS) });
    load = (await response.json().catch(() => ({}))).loading ?? null;
    return true;
  } catch {
    load = null;
    return false;
  }
}

// Shows the stage and the progress, in a box that is hidden while nothing is loading.
export function showLoad(box) {
  box.hidden = !load;
  if (!load) return;
  const { stage, progress, detail, since_s: seconds } = load;
  const share = progress === null ? "" : `${Math.round(100 * progress)} %`;
  const figures = [share, detail].filter(Boolean).join(" ");
  const words = `The server is ${stage}${figures && `: ${figures}`}`;
  const bar = box.querySelector("progress") ?? el("progress", { "aria-label": "Loading progress of the model" });
  if (progress === null) bar.removeAttribute("value");
  else bar.value = progress;
  if (!bar.parentNode) box.append(el("span", { class: "what" }), el("span"), bar);
  const [what, since] = box.querySelectorAll("span");
  what.textContent = words;
  since.textContent = `${Math.round(seconds)} s`;
}
