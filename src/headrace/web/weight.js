// Shows errors in plain words: amber, with the time until the next try, if the page tries again by itself; red if
// not.

import { button, el } from "./dom.js";

const MENDS = {
  unreachable: "The server cannot be reached.",
  server_overloaded: "The server is busy.",
  queue_timeout: "The server is busy.",
  rate_limit_exceeded: "This key has reached its limit for this minute.",
  server_shutdown: "The server is restarting.",
  server_restarting: "The server is restarting.",
  engine_failed: "The engine is restarting.",
  storage_unavailable: "The server cannot write to its disk now.",
  storage_stalled: "The server cannot write to its disk now.",
};
const FAILS = {
  context_length_exceeded: "With this message, the conversation is too long for the model.",
  request_too_large: "This message is larger than the server accepts.",
  request_timeout: "The answer took longer than the server allows. Ask for less.",
  load_failed: "The model could not be loaded.",
  stream_not_found: "The server no longer has the rest of this answer. Regenerate makes a new one.",
  unreachable: "The server cannot be reached.",
};

const inSeconds = (at) => Math.max(0, Math.ceil((at - Date.now()) / 1000));

// `at` is the time of the next try.
export function mending({ code, message }, at) {
  const seconds = inSeconds(at);
  const words = MENDS[code] ?? message.replace(/\.?$/, ".");
  return el("span", { class: "mends" }, `${words} Trying again${seconds ? ` in ${seconds} s` : ""}; what you see is kept.`);
}

// Whether a message was refused because it does not fit into the model's context.
export const isTooLong = ({ code, text }) => code === "context_length_exceeded" && !text;

// Returns the page's own words, followed by the server's message unless that says the same.
export function failing({ code, error }) {
  const words = FAILS[code];
  const said = words && code !== "context_length_exceeded" ? [el("span", { class: "said" }, error)] : [];
  return [el("span", { class: "trouble" }, words ?? error), ...said];
}

// Shows a line above the field. `weight` is "mends" or "fails".
export function showNotice(box, weight, words, action) {
  const label = action?.[0] ?? "";
  box.hidden = !words;
  box.className = `notice ${weight}`;
  if (box.dataset.action !== label) box.replaceChildren(el("span"), ...(action ? [button(...action)] : []));
  box.dataset.action = label;
  // Keep the button, so that it keeps its focus.
  if (box.firstChild.textContent !== words) box.firstChild.textContent = words;
}
