// How much of the model's context the next message takes: counted by the server, before it is sent.

import { ask } from "./api.js";
import { setTokens } from "./composer.js";
import { asText } from "./files.js";

const PAUSE_MS = 400; // of typing
const FROM = 0.5; // of the context: from there on it is said without any files
let timer = 0;
let number = 0; // of the count that is newest

async function count(model, what) {
  const headers = { "Content-Type": "application/json" };
  const response = await ask("/tokenize", { method: "POST", headers, body: JSON.stringify({ model, ...what }) });
  return response.ok ? response.json() : null;
}

// Soon, once the person pauses. `next()`: {model, context, messages, files}, as they would be sent.
export function countSoon(box, next) {
  clearTimeout(timer);
  timer = setTimeout(() => countNow(box, next()).catch(() => {}), PAUSE_MS); // others say that the server is away
}

async function countNow(box, { model, context, messages, files }) {
  const own = ++number;
  const isShort = !files.length && JSON.stringify(messages).length < FROM * context; // a token has a character at least
  if (!context || !messages.length || isShort) return void (box.hidden = true); // a model that is not known yet is not loaded for this
  for (const file of files) {
    if (file.kind !== "text" || file.countedBy === model) continue;
    const counted = await count(model, { content: asText(file) });
    if (counted) setTokens(file, counted.count, model);
  }
  const counted = await count(model, { messages });
  if (own !== number) return;
  box.hidden = !counted?.max_model_len || (!files.length && counted.count < FROM * counted.max_model_len);
  if (!box.hidden) show(box, counted.count, counted.max_model_len);
}

function show(box, taken, most) {
  const [meter, words] = box.children;
  Object.assign(meter, { max: most, low: 0.6 * most, high: 0.9 * most, optimum: 0, value: Math.min(taken, most) });
  const left = most - taken;
  const figure = (number) => number.toLocaleString("en");
  box.classList.toggle("bad", left <= 0);
  words.textContent = `${figure(taken)} of ${figure(most)} tokens · ${left > 0 ? `${figure(left)} left` : "too much: take something out"}`;
}
