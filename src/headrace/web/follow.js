// Follows one answer to its end, over as many connections as it takes.
//
// An answer without a stream is requested by its POST, with the same key and the same bytes each time. An answer
// with a stream is read on from its cursor. Each frame is applied once, which `place` decides by its id.

import { ask, errorOf, events } from "./api.js";
import { isBehind, saveAnswer } from "./store.js";

const FIRST_PAUSE_MS = 250;
const LONGEST_PAUSE_MS = 5000;
// Longest pause that is accepted from a server that names one.
const LONGEST_ASKED_MS = 60_000;
const SILENCE_MS = 15000; // three heartbeats, in milliseconds
// A slower upload counts as a lost connection.
const SLOWEST_BYTES_PER_MS = 16;
const SAVE_MS = 500;
const SLICE_MS = 1000;

// A browser opens six connections to a server, and a stop needs one of them. The answer in view has its own
// connection. All other answers of a tab take turns on another one.
const turns = { isTaken: false, waiting: [] };

async function takeTurn() {
  if (turns.isTaken) await new Promise((resolve) => turns.waiting.push(resolve));
  turns.isTaken = true;
}

function giveTurn() {
  const next = turns.waiting.shift();
  if (next) next();
  else turns.isTaken = false;
}

export class Follower {
  // `shown` is called after each change; `inView` returns whether the person sees the answer.
  constructor(answer, shown, inView) {
    this.answer = answer;
    this.shown = shown;
    this.inView = inView;
    // The status of the current connection, which is not saved.
    this.status = {};
    this.heardAt = Date.now();
    this.isClosed = false;
    this.pauseMs = 0;
    this.savedAt = 0;
  }

  async run() {
    while (this.answer.live && !this.isClosed) {
      await this.rest();
      const isShared = !this.inView() || document.hidden;
      if (isShared) await takeTurn();
      try {
        if (this.answer.live && !this.isClosed) await this.connect(isShared);
      } finally {
        if (isShared) giveTurn();
      }
    }
  }

  // Ends the connection; the next one follows at once.
  reconnect() {
    this.pauseMs = 0;
    this.wake?.();
    this.connection?.abort();
  }

  close() {
    this.isClosed = true;
    this.reconnect();
  }

  async stop() {
    this.answer.stopping = true;
    this.change();
    await this.save();
    this.sendStop();
  }

  // Sends the stop once the stream's id is known.
  sendStop() {
    if (this.answer.stopping && this.answer.stream) this.asking ??= this.askToStop().finally(() => (this.asking = null));
  }

  // Retries the stop until a server has received it, or until the answer has ended.
  async askToStop() {
    const path = `/v1/streams/${encodeURIComponent(this.answer.stream)}/cancel`;
    for (let pause = FIRST_PAUSE_MS; this.answer.live && !this.isClosed; pause = Math.min(2 * pause, LONGEST_PAUSE_MS)) {
      const response = await ask(path, { method: "POST", signal: AbortSignal.timeout(SILENCE_MS) }).catch(() => null);
      if (response?.ok || response?.status === 404) return;
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
  }

  rest() {
    const pause = this.pauseMs;
    if (!pause) return null;
    return new Promise((resolve) => {
      this.wake = resolve;
      setTimeout(resolve, pause);
    });
  }

  async connect(isShared) {
    this.connection = new AbortController();
    const size = this.answer.stream ? 0 : this.answer.body.length;
    // No answer can arrive while the request is being sent, so silence is counted from the expected end of that.
    let begunAt = (this.heardAt = Date.now() + size / SLOWEST_BYTES_PER_MS);
    const watch = setInterval(() => {
      const isOver = isShared && turns.waiting.length && Date.now() - begunAt > SLICE_MS;
      if (isOver || (isShared && this.inView() && !document.hidden)) this.reconnect();
      else if (Date.now() - this.heardAt > SILENCE_MS) this.connection.abort(new Error("silence"));
    }, 250);
    try {
      const response = await this.send();
      begunAt = this.heardAt = Date.now();
      if (await this.isRefused(response)) return;
      this.sendStop();
      await this.read(response);
      if (this.answer.live) this.trouble({ message: "The connection ended." });
    } catch (error) {
      if (error.name !== "AbortError") this.trouble({ code: "unreachable" });
    } finally {
      clearInterval(watch);
    }
  }

  send() {
    const answer = this.answer;
    const signal = this.connection.signal;
    if (!answer.stream) {
      const names = { "X-Conversation-Id": answer.conversation, "Idempotency-Key": answer.key };
      const sent = { "Content-Type": "application/json", ...names };
      return ask("/v1/chat/completions", { method: "POST", headers: sent, body: answer.body, signal });
    }
    const after = answer.cursor ? `&after=${encodeURIComponent(answer.cursor)}` : "";
    return ask(`/v1/streams/${encodeURIComponent(answer.stream)}/events?view=wire${after}`, { signal });
  }

  async isRefused(response) {
    if (response.status === 200) {
      const stream = response.headers.get("X-Stream-Id");
      if (!this.answer.stream && stream) {
        this.answer.stream = stream;
        await this.save();
      }
      return false;
    }
    if (response.status === 204) {
      await this.end({ outcome: "done" });
      return true;
    }
    const error = await errorOf(response);
    const mayTry = [408, 425, 429, 500, 502, 503, 504].includes(response.status);
    if (response.status === 401) {
      this.trouble({ code: "needs_key", message: "This server needs a key." }, LONGEST_PAUSE_MS);
    } else if (mayTry && error.code !== "load_failed") {
      const asked = Number(response.headers.get("Retry-After")) * 1000;
      this.trouble(error, Math.min(asked || 0, response.status === 429 ? LONGEST_ASKED_MS : LONGEST_PAUSE_MS));
    } else {
      await this.end({ outcome: "failed", code: error.code, error: error.message });
    }
    return true;
  }

  async read(response) {
    for await (const frame of events(response, () => this.alive())) {
      if (this.isClosed) return;
      if (frame.id && !isBehind(this.answer.cursor, frame.id)) continue;
      const isEnd = await this.apply(frame);
      if (isEnd) return;
    }
  }

  alive() {
    this.heardAt = Date.now();
    this.pauseMs = 0;
    if (this.status.trouble) {
      this.status = {};
      this.change();
    }
  }

  // Applies a frame to the answer, and returns whether it was the last one.
  async apply(frame) {
    if (frame.data === "[DONE]") {
      this.answer.cursor = frame.id || this.answer.cursor;
      await this.end({ outcome: "done" });
      return true;
    }
    const chunk = JSON.parse(frame.data);
    if (chunk.error) {
      if (chunk.error.code === "load_failed") return this.end({ outcome: "failed", code: chunk.error.code, error: chunk.error.message });
      // A frame without an id is about the connection, not about the answer.
      if (!frame.id) return false;
      this.answer.cursor = frame.id;
      const isStop = ["cancelled", "replaced"].includes(chunk.error.code);
      await this.end(isStop ? { outcome: "stopped" } : { outcome: "failed", code: chunk.error.code, error: chunk.error.message });
      return true;
    }
    if (!this.answer.stream && chunk.id) await this.name(chunk.id);
    this.take(chunk);
    if (frame.id) this.answer.cursor = frame.id;
    this.change();
    if (Date.now() - this.savedAt > SAVE_MS) await this.save();
    return false;
  }

  // Names the stream of an answer that had to wait for its model: its headers came before the stream existed.
  async name(stream) {
    this.answer.stream = stream;
    await this.save();
    this.sendStop();
  }

  take(chunk) {
    const answer = this.answer;
    if (chunk.queue) this.status = { queue: chunk.queue };
    if (chunk.prompt_progress) this.status = { prompt: chunk.prompt_progress };
    if (chunk.recovering) this.status = { recovering: chunk.recovering, since: this.status.since ?? Date.now() };
    if (chunk.timings) answer.timings = chunk.timings;
    if (chunk.usage) answer.usage = chunk.usage;
    answer.model ||= chunk.model;
    const choice = chunk.choices?.[0];
    const delta = choice?.delta ?? {};
    if (choice?.finish_reason) answer.finish = choice.finish_reason;
    answer.text += delta.content ?? "";
    answer.reasoning += delta.reasoning_content ?? "";
    if (delta.reasoning_content) answer.thoughtMs = chunk.timings?.predicted_ms;
    for (const call of delta.tool_calls ?? []) {
      const known = (answer.calls[call.index] ??= { id: "", name: "", arguments: "" });
      known.id ||= call.id ?? "";
      known.name ||= call.function?.name ?? "";
      known.arguments += call.function?.arguments ?? "";
    }
    if (delta.content || delta.reasoning_content || delta.tool_calls) this.status = { isSpeaking: true };
  }

  // Records a failure of the connection as {code, message}. The connection is tried again after a pause.
  trouble(what, leastMs = 0) {
    const doubled = Math.min(this.pauseMs * 2 || FIRST_PAUSE_MS, LONGEST_PAUSE_MS);
    this.pauseMs = Math.max(doubled, leastMs);
    this.status = { ...this.status, trouble: what, nextAt: Date.now() + this.pauseMs };
    this.change();
  }

  async end(how) {
    // Nothing is requested again.
    for (const name of ["live", "body", "key"]) delete this.answer[name];
    Object.assign(this.answer, how);
    this.status = {};
    this.change();
    await this.save();
    return true;
  }

  change() {
    this.shown(this);
  }

  // Saves after the next paint, so that saved text has been shown.
  async save() {
    this.savedAt = Date.now();
    if (!document.hidden) await new Promise((resolve) => {
      requestAnimationFrame(resolve);
      setTimeout(resolve, 100);
    });
    // The page reports a failure to save, and the server still has the answer.
    if (!this.isClosed || !this.answer.live) await saveAnswer(this.answer).catch(() => {});
  }
}
