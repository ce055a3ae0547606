// Sends requests to the server with the key that the person gave, and reads server-sent events.

import { breathe } from "./dom.js";
import { settings } from "./settings.js";

let usesAdminKey = false;

// Makes this page send the admin key, if the person gave one. Only the dashboard calls this: the chat page must send
// the key that created its streams.
export const useAdminKey = () => (usesAdminKey = true);

export function headers(more = {}) {
  const key = (usesAdminKey && settings().adminKey) || settings().key;
  return key ? { Authorization: `Bearer ${key}`, ...more } : more;
}

// The server may be below a path. This file is in a folder directly below that path.
const root = new URL("..", import.meta.url);

// Uses fetch, since an EventSource cannot send a key.
export function ask(path, options = {}) {
  return fetch(new URL(path.slice(1), root), { cache: "no-store", ...options, headers: headers(options.headers) });
}

// Sends the fields as a JSON body.
export function post(path, fields, signal) {
  return ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(fields), signal });
}

// Returns whether the server has an admin key. A server without one answers 403; a server with one answers 401 to
// a request without a key.
export const isAdminKeyTaken = async () => (await fetch(new URL("manage/state", root), { cache: "no-store" })).status === 401;

// Longest time to handle events that arrived together before the page may react to input.
const SLICE_MS = 10;

export async function errorOf(response) {
  try {
    const { error } = await response.json();
    return { code: String(error.code), message: String(error.message) };
  } catch {
    return { code: String(response.status), message: `The server answered ${response.status}.` };
  }
}

// Yields every event of a body as {id, event, data}; calls `alive` each time that data arrives.
export async function* events(response, alive = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let frame = { id: "", event: "", data: "" };
  let since = performance.now();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      alive();
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (performance.now() - since > SLICE_MS) {
          await breathe();
          since = performance.now();
        }
        if (line === "") {
          if (frame.data) yield frame;
          frame = { id: "", event: "", data: "" };
        }
        const found = /^(id|event|data): ?(.*)$/s.exec(line);
        if (found) frame[found[1]] += found[2];
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
