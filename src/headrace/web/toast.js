// Lines at the foot of the window that go by themselves: what has been done, and how to undo it.

import { button, el } from "./dom.js";
import { icon } from "./icons.js";

const SHOWN_MS = 5000;
export const UNDO_MS = 10_000;

// With `undo` there is a button for it; `settle` is called once it is too late.
export function toast(words, { undo, settle = () => {} } = {}) {
  let timer = 0;
  const end = (act) => {
    clearTimeout(timer);
    box.remove();
    act();
  };
  // not while a person is about to press something in it
  const endIn = (ms) => (timer = setTimeout(() => (box.matches(":hover, :focus-within") ? endIn(1000) : end(settle)), ms));
  const box = el("div", { class: "toast" }, el("span", {}, words),
    undo && button("Undo", () => end(undo)), button(icon("close"), () => end(settle), { "aria-label": "Dismiss" }));
  document.getElementById("toasts").append(box);
  endIn(undo ? UNDO_MS : SHOWN_MS);
}
