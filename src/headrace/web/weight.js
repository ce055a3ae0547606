// Errors in a person's words, by weight: amber for what mends itself, with the time until the next
// try; red for what does not.

import { button, el } from "./dom.js";

const MENDS = {
  unreachable: "The server cannot be reached.",
  server_overloaded: "The server is busy.",
  queue_timeout: "The server is busy.",
  rate_limit_exceeded: "This key may ask for no more in this minute.",
  server_shutdown: "The server is restarting.",
  server_restarting: "The server is restarting.",
  engine_failed: "The engine is restarting.",
  storage_unavailable: "The server cannot write to its disk just now.",
  storage_stalled: "The server cannot write to its disk just now.",
};
const FAILS = {
  context_length_exceeded: "This is more than the model can read at once. Take out a file, ask for a shorter answer, or begin a new conversation.",
  request_too_large: "This message is larger than the server takes.",
  request_timeout: "The answer took longer than the server allows. Ask for less.",
  load_failed: "The model could not be loaded.",
  stream_not_found: "The server no longer has the rest of this answer. Regenerate makes a new one.",
  unreachable: "The server cannot be reached.",
};

const inSeconds = (at) => Math.max(0, Math.ceil((at - Date.now()) / 1000));

// `at`: when it is tried again.
export function mending({ code, message }, at) {
  const seconds = inSeconds(at);
  const words = MENDS[code] ?? message.replace(/\.?$/, ".");
  return el("span", { class: "mends" }, `${words} Trying again${seconds ? ` in ${seconds} s` : ""}; what you see is kept.`);
}

// In our words, with the server's own behind them.
export function failing({ code, error }) {
  const words = FAILS[code];
  return words ? [el("span", { class: "trouble" }, words), el("span", { class: "said" }, error)] : [el("span", { class: "trouble" }, error)];
}

// A line above the field: `weight` is "mends" or "fails".
export function showNotice(box, weight, words, action) {
  const label = action?.[0] ?? "";
  box.hidden = !words;
  box.className = `notice ${weight}`;
  if (box.dataset.action !== label) box.replaceChildren(el("span"), ...(action ? [button(...action)] : []));
  box.dataset.action = label;
  if (box.firstChild.textContent !== words) box.firstChild.textContent = words; // a button keeps its focus
}
