// Shows how much of the model's context the next message takes; the server counts it before it is sent.

import { post } from "./api.js";
import { setTokens } from "./composer.js";
import { asText } from "./files.js";

const PAUSE_MS = 400; // milliseconds without typing
// Share of the context from which on the count is shown even without files.
const FROM = 0.5;
let timer = 0;
// Whether the last count exceeded the context.
let exceeds = false;
// The number of the newest count.
let number = 0;

async function count(model, what) {
  const response = await post("/tokenize", { model, ...what });
  return response.ok ? response.json() : null;
}

export const isTooLong = () => exceeds;

// Counts once the person pauses. `next()` returns {model, context, messages, files} as they would be sent. `done` is
// called after the count.
export function countSoon(box, next, done) {
  clearTimeout(timer);
  // Other parts of the page report that the server is away.
  timer = setTimeout(() => countNow(box, next()).catch(() => show(box)).finally(done), PAUSE_MS);
}

async function countNow(box, { model, context, messages, files }) {
  const own = ++number;
  // A token has at least one character.
  const isShort = !files.length && JSON.stringify(messages).length < FROM * context;
  // Counting would load a model that is not loaded.
  if (!context || !messages.length || isShort) return show(box);
  for (const file of files) {
    if (file.kind !== "text" || file.countedBy === model) continue;
    const counted = await count(model, { content: asText(file) });
    if (counted) setTokens(file, counted.count, model);
  }
  const counted = await count(model, { messages });
  if (own !== number) return;
  const { count: taken, max_model_len: most } = counted ?? {};
  show(box, taken, files.length || taken >= FROM * most ? most : 0);
}

// Hides the box if `most` is missing.
function show(box, taken, most) {
  box.hidden = !most;
  exceeds = most > 0 && taken >= most;
  if (!most) return;
  const [meter, words] = box.children;
  Object.assign(meter, { max: most, low: 0.6 * most, high: 0.9 * most, optimum: 0, value: Math.min(taken, most) });
  const left = most - taken;
  const figure = (number) => number.toLocaleString("en");
  box.classList.toggle("bad", exceeds);
  words.textContent = `${figure(taken)} of ${figure(most)} tokens · ${exceeds ? "too long: shorten the message, remove a file or start a new conversation" : `${figure(left)} left`}`;
}
