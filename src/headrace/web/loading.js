// What the server does while it loads its only model, as its health says.

import { ask } from "./api.js";

let words = "";
let isAsking = false;

// What to say while the model is being loaded, or nothing.
export const loadWords = () => words;

// Asks the server anew, unless it is being asked.
export async function lookAtLoad() {
  if (isAsking) return;
  isAsking = true;
  try {
    const { loading } = await (await ask("/health")).json();
    words = loading ? sentence(loading) : "";
  } catch {
    words = ""; // others say that the server is away
  }
  isAsking = false;
}

function sentence({ stage, progress, detail, since_s: seconds }) {
  const figures = [progress === null ? "" : `${Math.round(100 * progress)} %`, detail].filter(Boolean).join(" ");
  return `The server is ${[stage, figures].filter(Boolean).join(", ")} (${Math.round(seconds)} s)`;
}
