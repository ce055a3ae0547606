// Requests to the server, with the key that the person gave, and server-sent events.

import { breathe } from "./dom.js";
import { settings } from "./settings.js";

let usesAdminKey = false;

// From now on the admin's key is sent, if there is one. The chat has its own: streams are those of a key.
export const useAdminKey = () => (usesAdminKey = true);

export function headers(more = {}) {
  const key = (usesAdminKey && settings().adminKey) || settings().key;
  return key ? { Authorization: `Bearer ${key}`, ...more } : more;
}

// The server may lie below a path, and this file lies in a folder of it.
const root = new URL("..", import.meta.url);

// fetch, since an EventSource cannot send a key.
export function ask(path, options = {}) {
  return fetch(new URL(path.slice(1), root), { cache: "no-store", ...options, headers: headers(options.headers) });
}

// Whether the server has an admin key at all: one that has none forbids what another asks a key for.
export const isAdminKeyTaken = async () => (await fetch(new URL("manage/state", root), { cache: "no-store" })).status === 401;

const SLICE_MS = 10; // of the events that have come at once

export async function errorOf(response) {
  try {
    const { error } = await response.json();
    return { code: String(error.code), message: String(error.message) };
  } catch {
    return { code: String(response.status), message: `The server answered ${response.status}.` };
  }
}

// Every event of a body as {id, event, data}; `alive` is called for each sign of life.
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
