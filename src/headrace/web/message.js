// Shows one message, and the status of an answer that is still being generated.

import { Card } from "./cards.js";
import { Confidence } from "./confidence.js";
import { button, copyButton, duration, el } from "./dom.js";
import { editor, grow, isBeingEdited } from "./edit.js";
import { figures } from "./figures.js";
import { shownFiles } from "./files.js";
import { thumbnails } from "./images.js";
import { isLoading } from "./loading.js";
import { openMenu } from "./menu.js";
import { loadingOf, others } from "./models.js";
import { isAway } from "./presence.js";
import { TextView } from "./text.js";
import { AnswerView } from "./structured.js";
import { keepTyped, typed } from "./typed.js";
import { failing, isTooLong, mending } from "./weight.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Tool results" };

export class MessageView {
  constructor(message, acts) {
    this.message = message;
    this.acts = acts;
    this.reasoning = el("pre");
    this.thinking = el("details", { class: "thinking" }, el("summary"), this.reasoning);
    this.calls = el("div", { class: "calls" });
    this.answering = el("div");
    this.images = el("div", { class: "thumbs" }, ...thumbnails(message.images ?? []), ...shownFiles(message.files ?? []));
    this.body = el("div", { class: "body" });
    this.status = el("div", { class: "status" });
    this.foot = el("div", { class: "foot" });
    this.confidence = new Confidence(this.body, message, () => acts.fieldsOf(message));
    const View = message.role === "assistant" ? AnswerView : TextView;
    this.text = new View(this.body);
    this.thought = new TextView(this.reasoning);
    // The cards of calls and results.
    this.cards = [];
    this.node = el(
      "article",
      { class: `message ${message.role}`, "data-id": message.id },
      el("h2", { class: "unseen" }, NAMES[message.role]), this.thinking, this.images, this.body, this.calls, this.answering, this.status, this.foot,
    );
  }

  // Shows as much of the message as it can by the deadline; returns whether all is shown.
  show(follower, deadline) {
    const message = this.message;
    this.thinking.hidden = !message.reasoning;
    if (message.reasoning) this.thinking.firstChild.textContent = thought(message);
    const isShown =
      this.thought.update(message.reasoning, deadline) &&
      (message.role === "tool" || this.text.update(message.text, deadline, message.live)) &&
      this.showCalls(deadline);
    this.showStatus(follower);
    const isBusy = String(Boolean(message.live) || !isShown);
    if (this.node.getAttribute("aria-busy") !== isBusy) this.node.setAttribute("aria-busy", isBusy);
    const state = `${message.live ? "live" : "done"} ${message.role === "assistant" ? others(message.model ?? message.wanted) : ""}`;
    if (this.state !== state) {
      this.state = state;
      this.foot.replaceChildren(...this.buttons());
      if (!message.live && message.calls.length && !this.answering.firstChild && this.acts.isLeaf(message)) this.askForResults(message, []);
      if (!message.live && !this.form && isBeingEdited(message)) this.edit();
    }
    return isShown;
  }

  showCalls(deadline) {
    const { calls, results = [], live } = this.message;
    const all = [...calls.map((one) => ["call", one.name, one.arguments]), ...results.map((one) => ["result", one.name, one.text])];
    return all.every(([kind, name, text], k) => {
      const card = (this.cards[k] ??= new Card(kind, name));
      if (!card.node.parentNode) this.calls.append(card.node);
      return card.show(name, text, !live, deadline);
    });
  }

  // Shows one field per call, for results that a person types.
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
        isTooLong(message) && acts.before(message)?.role === "user" && button("Take your message back to shorten it", () => acts.putBack(message)),
        canGoOn(message) && acts.isLeaf(message) && button("Continue", () => acts.goOn(message)),
        button("Regenerate", () => acts.regenerate(message)),
        regenerateBy(others(message.model ?? message.wanted), (model) => acts.regenerate(message, model)),
        message.text && button("Edit", edit),
        this.confidence.button(),
      ],
    }[message.role]();
    const copy = message.text && copyButton("Copy message", () => message.text);
    return [...this.branches(), copy, ...own, ...figures(message)].filter(Boolean);
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

  // Replaces the message by a field with its text, and returns the field.
  edit() {
    if (this.form) return this.form.querySelector("textarea");
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

function thought({ text, live, thoughtMs }) {
  const time = thoughtMs ? ` for ${duration(thoughtMs / 1000)}` : "";
  return live && !text ? `Thinking${time}…` : `Thought${time}`;
}

// Whether an answer ended early or was edited, so that the model can continue it.
const canGoOn = ({ text, calls, outcome, finish }) => Boolean(text) && !calls.length && (outcome !== "done" || finish === "length");

// Opens a menu of models, if there are others.
function regenerateBy(models, act) {
  if (!models.length) return null;
  const words = "Regenerate with another model";
  const made = button("▾", () => openMenu(made, models.map((id) => ["again", id, () => act(id)])), { "aria-label": words, title: words, "aria-haspopup": "menu" });
  return made;
}

function waiting(message, follower) {
  if (!follower) return [el("span", {}, "Waiting for the server")];
  const { trouble, nextAt, queue, prompt, recovering, since } = follower.status;
  const silence = Math.floor((Date.now() - follower.heardAt) / 1000);
  const parts = [];
  if (message.stopping) parts.push(el("span", {}, "Stopping"));
  else if (trouble && isLoading()) parts.push(el("span", {}, "Waiting until the server has loaded its model"));
  else if (trouble && isAway()) parts.push(el("span", {}, "The answer continues once the server can be reached"));
  else if (trouble) parts.push(mending(trouble, nextAt));
  else if (recovering) parts.push(el("span", {}, `The engine is restarting (attempt ${recovering.attempt}, ${duration((Date.now() - since) / 1000)}); the answer continues from here.`));
  else if (queue) parts.push(el("span", {}, `Position ${queue.position} of ${queue.waiting} in the queue${queue.eta_ms == null ? "" : `, about ${duration(queue.eta_ms / 1000)}`}`));
  else if (prompt) parts.push(...promptBar(prompt));
  else if (message.timings?.predicted_per_second) parts.push(el("span", {}, rate(message)));
  else parts.push(el("span", {}, loadingOf(message.wanted) || "Waiting for the first token"));
  if (silence > 5 && !isLoading() && !isAway() && !trouble) parts.push(el("span", { class: "silence" }, `no data from the server for ${silence} s`));
  return parts;
}

function promptBar({ total, cache, processed, time_ms: ms }) {
  const speed = ms > 0 ? (1000 * (processed - cache)) / ms : 0;
  const bar = el("progress", { max: total, value: processed, "aria-label": "Prompt processed" });
  const figures = [`Processing the prompt: ${processed.toLocaleString("en")} of ${total.toLocaleString("en")} tokens`];
  if (speed) figures.push(`${Math.round(speed)} tokens/s`);
  if (cache) figures.push(`${Math.round((100 * cache) / total)} % cached`);
  if (speed && processed < total) figures.push(`${duration((total - processed) / speed)} left`);
  return [bar, el("span", {}, figures.join(" · "))];
}

const rate = ({ timings }) => `${timings.predicted_n} tokens · ${timings.predicted_per_second.toFixed(1)} tokens/s`;

function ended(message) {
  if (message.role !== "assistant") return [];
  const parts = [];
  if (message.outcome === "failed") parts.push(...failing(message));
  if (message.outcome === "stopped") parts.push(el("span", {}, "Stopped"));
  if (message.finish === "length") parts.push(el("span", {}, "Stopped at the token limit"));
  if (message.outcome === "edited") parts.push(el("span", {}, "Edited"));
  return parts;
}
