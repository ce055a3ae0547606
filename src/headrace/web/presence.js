// Checks now and then whether the server can be reached, also while nothing runs.

import { el } from "./dom.js";
import { isLoading, lookAtLoad } from "./loading.js";
import { toast } from "./toast.js";
import { showNotice } from "./weight.js";

const HERE_MS = 15_000; // milliseconds between two checks
const AWAY_MS = 4000;
const $ = (id) => document.getElementById(id);
let isThere = null; // null until the first check
let nextAt = 0;

export const isAway = () => isThere === false;

// Checks the server if that is due or `isUrgent`; returns whether the server has come back.
export async function lookAtServer(isUrgent = false) {
  const isDue = isUrgent || Date.now() >= nextAt;
  // No further check begins before this one has ended.
  if (isDue) nextAt = Infinity;
  const answered = isDue ? await lookAtLoad() : isThere;
  const isBack = isAway() && answered;
  if (isDue) nextAt = Date.now() + (answered ? HERE_MS : AWAY_MS);
  if (isBack) toast("Reconnected.");
  if (isThere && !answered) $("news").textContent = "The server cannot be reached.";
  isThere = answered;
  showPresence();
  return isBack;
}

function showPresence() {
  const isReady = isThere && !isLoading();
  const words = isReady ? "Connected" : isThere ? "Loading the model" : isThere === null ? "Connecting" : "No connection";
  if ($("presence").textContent !== words) $("presence").replaceChildren(el("span", { class: `dot ${isReady ? "here" : "away"}` }), words);
  const seconds = Math.ceil((nextAt - Date.now()) / 1000);
  const when = seconds > 0 && seconds < 60 ? ` in ${seconds} s` : "";
  showNotice($("away"), "mends", isAway() ? `The server cannot be reached. Trying again${when}. Nothing is lost meanwhile.` : "", ["Try now", () => dispatchEvent(new Event("online"))]);
}
