// One message on the screen, and what is known of an answer that is still coming.

import { button, copyButton, duration, el } from "./dom.js";
import { editor, grow, isBeingEdited } from "./edit.js";
import { figures } from "./figures.js";
import { thumbnails } from "./images.js";
import { MarkdownView } from "./markdown.js";
import { isLoading } from "./loading.js";
import { loadingOf, others } from "./models.js";
import { TextView } from "./text.js";
import { keepTyped, typed } from "./typed.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Results of tools" };

// A text below its title, which folds it away.
class Folded {
  constructor() {
    this.title = el("summary");
    this.pre = el("pre", { tabindex: "0" });
    this.node = el("details", { open: true }, this.title, this.pre);
    this.text = new TextView(this.pre);
  }

  show(title, text, deadline) {
    if (this.title.textContent !== title) this.title.textContent = title;
    return this.text.update(text, deadline);
  }
}

export class MessageView {
  constructor(message, acts) {
    this.message = message;
    this.acts = acts;
    this.reasoning = el("pre");
    this.thinking = el("details", { class: "thinking" }, el("summary", {}, "Reasoning"), this.reasoning);
    this.calls = el("div", { class: "calls" });
    this.answering = el("div");
    this.images = el("div", { class: "thumbs" }, ...thumbnails(message.images ?? []));
    this.body = el("div", { class: "body" });
    this.status = el("div", { class: "status" });
    this.foot = el("div", { class: "foot" });
    const View = message.role === "assistant" ? MarkdownView : TextView;
    this.text = new View(this.body);
    this.thought = new TextView(this.reasoning);
    this.folded = []; // calls and results
    this.node = el(
      "article",
      { class: `message ${message.role}`, "data-id": message.id },
      el("h2", { class: "unseen" }, NAMES[message.role]), this.thinking, this.images, this.body, this.calls, this.answering, this.status, this.foot,
    );
  }

  // Shows as much of the message as it can by the deadline, and says whether that is all.
  show(follower, deadline) {
    const message = this.message;
    this.thinking.hidden = !message.reasoning;
    const isShown =
      this.thought.update(message.reasoning, deadline) &&
      (message.role === "tool" || this.text.update(message.text, deadline)) &&
      this.showCalls(deadline);
    this.showStatus(follower);
    const state = `${message.live ? "live" : "done"} ${message.role === "assistant" ? others(message.model) : ""}`;
    if (this.state !== state) {
      this.state = state;
      this.node.setAttribute("aria-busy", String(Boolean(message.live)));
      this.foot.replaceChildren(...this.buttons());
      if (!message.live && message.calls.length && !this.answering.firstChild && this.acts.isLeaf(message)) this.askForResults(message, []);
      if (!message.live && !this.form && isBeingEdited(message)) this.edit();
    }
    return isShown;
  }

  showCalls(deadline) {
    const calls = this.message.calls.map((call) => [`Tool call: ${call.name}`, call.arguments]);
    const results = (this.message.results ?? []).map((result) => [`Result of ${result.name}`, result.text]);
    return [...calls, ...results].every(([title, text], k) => {
      const folded = (this.folded[k] ??= new Folded());
      if (!folded.node.parentNode) this.calls.append(folded.node);
      return folded.show(title, text, deadline);
    });
  }

  // A field per call, for the results that a person gives by hand.
  askForResults(message, texts) {
    texts = typed(message.id) ?? texts;
    const fields = message.calls.map((call, k) => {
      const field = el("textarea", { rows: 2, "aria-label": `Result of ${call.name}`, placeholder: `Result of ${call.name}` });
      field.value = texts[k] ?? "";
      return field;
    });
    const values = () => fields.map((field) => field.value);
    const input = () => keepTyped(message.id, values());
    const submit = (event) => {
      event.preventDefault();
      this.acts.giveResults(message, values());
    };
    const send = el("button", { class: "primary" }, fields.length > 1 ? "Send results" : "Send result");
    this.answering.replaceChildren(el("form", { class: "results", on: { input, submit } }, ...fields, send));
    return fields[0];
  }

  showStatus(follower) {
    const message = this.message;
    const parts = message.live ? waiting(message, follower) : ended(message);
    this.status.replaceChildren(...parts);
    this.status.hidden = !parts.length || Boolean(this.form);
  }

  buttons() {
    const { message, acts } = this;
    if (message.live) return [];
    const edit = () => this.edit().focus();
    const own = {
      user: () => [button("Edit", edit)],
      tool: () => [button("Edit", () => this.askForResults(acts.before(message), message.results.map(({ text }) => text)).focus())],
      assistant: () => [
        canGoOn(message) && acts.isLeaf(message) && button("Continue", () => acts.goOn(message)),
        button("Regenerate", () => acts.regenerate(message)),
        regenerateBy(others(message.model), (model) => acts.regenerate(message, model)),
        message.text && button("Edit", edit),
      ],
    }[message.role]();
    return [...this.branches(), copyButton("Copy message", () => message.text), ...own.filter(Boolean)];
  }

  branches() {
    const [at, siblings] = this.acts.place(this.message);
    if (siblings.length < 2) return [];
    return [
      button("‹", () => this.acts.branch(siblings[at - 1]), { disabled: at === 0, "aria-label": "Earlier version" }),
      el("span", {}, `${at + 1} of ${siblings.length}`),
      button("›", () => this.acts.branch(siblings[at + 1]), { disabled: at === siblings.length - 1, "aria-label": "Later version" }),
    ];
  }

  // The message becomes a field in its place, which is returned.
  edit() {
    const { message, acts } = this;
    const take = message.role === "user" ? acts.edit : acts.amend;
    const [form, field] = editor(message, (text) => take(message, text), () => this.close());
    this.form = form;
    this.body.hidden = this.foot.hidden = this.status.hidden = true;
    this.body.after(form);
    grow(field);
    return field;
  }

  close() {
    this.form.remove();
    this.form = null;
    this.body.hidden = this.foot.hidden = this.status.hidden = false;
    this.foot.querySelector("button")?.focus();
  }
}

// Where an answer was broken off, or changed by hand.
const canGoOn = ({ text, calls, outcome, finish }) => Boolean(text) && !calls.length && (outcome !== "done" || finish === "length");

// A menu of models, where there are others.
function regenerateBy(models, act) {
  if (!models.length) return null;
  const title = el("summary", { "aria-label": "Regenerate with another model", title: "Regenerate with another model" }, "▾");
  return el("details", { class: "menu" }, title, el("div", {}, ...models.map((id) => button(id, () => act(id)))));
}

function waiting(message, follower) {
  if (!follower) return [el("span", {}, "Waiting for the server")];
  const { trouble, queue, prompt, recovering } = follower.status;
  const silence = Math.floor((Date.now() - follower.heardAt) / 1000);
  const parts = [];
  if (message.stopping) parts.push(el("span", {}, "Stopping"));
  else if (trouble && isLoading()) parts.push(el("span", {}, "Waiting until the server has loaded its model"));
  else if (trouble) parts.push(el("span", { class: "trouble" }, `${trouble.replace(/\.?$/, ".")} Trying again; what you see is kept.`));
  else if (recovering) parts.push(el("span", {}, `The engine is restarting (attempt ${recovering.attempt}); the answer goes on from here.`));
  else if (queue) parts.push(el("span", {}, `Place ${queue.position} of ${queue.waiting} in the queue${queue.eta_ms == null ? "" : `, about ${duration(queue.eta_ms / 1000)}`}`));
  else if (prompt) parts.push(...promptBar(prompt));
  else if (message.timings?.predicted_per_second) parts.push(el("span", {}, rate(message)));
  else parts.push(el("span", {}, loadingOf(message.wanted) || "Waiting for the first token"));
  if (silence > 5 && !isLoading()) parts.push(el("span", { class: "silence" }, `last sign of life ${silence} s ago`));
  return parts;
}

function promptBar({ total, cache, processed, time_ms: ms }) {
  const speed = ms > 0 ? (1000 * (processed - cache)) / ms : 0;
  const bar = el("progress", { max: total, value: processed, "aria-label": "Prompt processed" });
  const figures = [`Reading the prompt: ${processed} of ${total} tokens`];
  if (speed) figures.push(`${Math.round(speed)} tokens/s`);
  if (cache) figures.push(`${Math.round((100 * cache) / total)} % cached`);
  if (speed && processed < total) figures.push(`${duration((total - processed) / speed)} left`);
  return [bar, el("span", {}, figures.join(" · "))];
}

const rate = ({ timings }) => `${timings.predicted_n} tokens · ${timings.predicted_per_second.toFixed(1)} tokens/s`;

function ended(message) {
  if (message.role !== "assistant") return [];
  const parts = [];
  if (message.outcome === "failed") parts.push(el("span", { class: "trouble" }, message.error));
  if (message.outcome === "stopped") parts.push(el("span", {}, "Stopped"));
  if (message.finish === "length") parts.push(el("span", {}, "Cut at the token limit"));
  if (message.outcome === "edited") parts.push(el("span", {}, "Edited"));
  return [...parts, ...figures(message)];
}
