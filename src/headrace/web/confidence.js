// Shows how sure the model was of each token of an answer. The server scores the text on request.

import { errorOf, post } from "./api.js";
import { button, el } from "./dom.js";

// Number of tokens that are shown.
const MAX_TOKENS = 4000;
// The lowest probability of each colour, from the surest on.
const LEVELS = [0.9, 0.7, 0.4, 0.1];

// A button below an answer that shows its tokens in place of its text.
export class Confidence {
  // `fields` returns the fields of the request that led to the answer, or null if they cannot be scored.
  constructor(body, message, fields) {
    Object.assign(this, { body, message, fields, shown: null });
  }

  button() {
    const { text, reasoning, calls } = this.message;
    if (!text || reasoning || calls.length || !this.fields()) return null;
    const made = button("Confidence", () => this.toggle(made), { "aria-pressed": String(Boolean(this.shown)) });
    return made;
  }

  async toggle(made) {
    if (this.shown) this.shown = void this.shown.remove();
    else {
      made.disabled = true;
      this.shown = await scored(this.message.text, this.fields()).then(confidenceView, trouble);
      made.disabled = false;
      this.body.after(this.shown);
    }
    this.body.hidden = Boolean(this.shown);
    made.setAttribute("aria-pressed", String(Boolean(this.shown)));
  }
}

const trouble = (error) => el("p", { class: "trouble", role: "alert" }, `The tokens could not be scored: ${error.message}`);

async function asked(path, fields) {
  const response = await post(path, fields);
  if (!response.ok) throw new Error((await errorOf(response)).message);
  return response.json();
}

// Returns each token as {text, share, others}; `fields` are those of the request that led to the answer.
async function scored(text, { messages, tools, model }) {
  const { prompt } = await asked("/apply-template", { messages, ...(tools ? { tools } : {}), model });
  const { choices } = await asked("/v1/completions", { prompt: prompt + text, model, echo: true, logprobs: 5, max_tokens: 1, temperature: 0 });
  return tokensOf(text, [...prompt].length, choices[0].logprobs);
}

// The scores begin with the tokens of the prompt, and end with one token after the text.
function tokensOf(text, start, { text_offset: offsets, token_logprobs: scores, top_logprobs: tops }) {
  const letters = [...text];
  const found = [];
  for (const [k, offset] of offsets.entries()) {
    const [from, to] = [offset - start, k + 1 < offsets.length ? offsets[k + 1] - start : letters.length];
    if (to <= 0 || from >= letters.length || to === from) continue;
    const others = Object.entries(tops?.[k] ?? {}).map(([token, score]) => [token, Math.exp(score)]);
    found.push({ text: letters.slice(Math.max(0, from), to).join(""), share: Math.exp(scores[k] ?? 0), others: others.sort((a, b) => b[1] - a[1]) });
  }
  return found;
}

const percent = (share) => (share < 0.01 ? "< 1 %" : `${Math.round(100 * share)} %`);
const level = (share) => LEVELS.filter((least) => share < least).length;

function words({ text, share, others }) {
  const more = others.filter(([token]) => token !== text).slice(0, 3).map(([token, other]) => `${JSON.stringify(token)} ${percent(other)}`);
  return `${JSON.stringify(text)} ${percent(share)}${more.length ? ` · instead: ${more.join(", ")}` : ""}`;
}

// Shows the coloured tokens. The token under the pointer, or chosen by arrow keys, is described below.
function confidenceView(tokens) {
  const shown = tokens.slice(0, MAX_TOKENS);
  const spans = shown.map(({ text, share }, k) => el("span", { class: `sure-${level(share)}`, "data-k": k }, text));
  const detail = el("p", { class: "soft detail", "aria-live": "polite" }, hint(tokens.length));
  let at = -1;
  const choose = (k) => {
    if (!(k >= 0 && k < spans.length)) return;
    spans[at]?.classList.remove("chosen");
    spans[(at = k)].classList.add("chosen");
    detail.textContent = words(shown[k]);
  };
  const point = ({ target }) => target.dataset.k && choose(Number(target.dataset.k));
  const keydown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    choose(at + step);
  };
  const text = el("pre", { class: "tokens", tabindex: "0", "aria-label": "Tokens; the arrow keys choose one", on: { keydown, click: point, mouseover: point } }, ...spans);
  return el("div", { class: "confidence" }, text, detail);
}

function hint(num) {
  const some = num > MAX_TOKENS ? ` The first ${MAX_TOKENS} of ${num} tokens.` : "";
  return `The stronger the colour, the less likely was the token. Point at one, or use the arrow keys.${some}`;
}
