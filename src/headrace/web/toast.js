// Short messages at the bottom of the window that disappear by themselves; some offer to undo an action.

import { button, el } from "./dom.js";
import { icon } from "./icons.js";

const SHOWN_MS = 5000;
export const UNDO_MS = 10_000;

// With `undo`, the message has a button for it; `settle` is called once it is too late to undo.
export function toast(words, { undo, settle = () => {} } = {}) {
  let timer = 0;
  const end = (act) => {
    clearTimeout(timer);
    box.remove();
    act();
  };
  // Stays while a person may be about to press a button in it.
  const endIn = (ms) => (timer = setTimeout(() => (box.matches(":hover, :focus-within") ? endIn(1000) : end(settle)), ms));
  const box = el("div", { class: "toast" }, el("span", {}, words),
    undo && button("Undo", () => end(undo)), button(icon("close"), () => end(settle), { "aria-label": "Dismiss" }));
  document.getElementById("toasts").append(box);
  endIn(undo ? UNDO_MS : SHOWN_MS);
}
