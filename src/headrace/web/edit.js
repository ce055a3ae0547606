// A message that is edited in its place. What was typed outlives the page.

import { button, el } from "./dom.js";
import { forgetTyped, keepTyped, typed } from "./typed.js";

const nameOf = (message) => `edit-${message.id}`;

export const isBeingEdited = (message) => typed(nameOf(message)) !== null;

// The form; `take` is given the new text, `close` is called when the person would rather not.
export function editor(message, take, close) {
  const field = el("textarea", { "aria-label": "Edit the message", rows: 1 });
  const name = nameOf(message);
  field.value = typed(name)?.[0] ?? message.text;
  const leave = () => (forgetTyped(name), close());
  const submit = (event) => {
    event.preventDefault();
    if (!field.value.trim()) return;
    forgetTyped(name);
    take(field.value);
  };
  const keydown = (event) => {
    if (event.isComposing) return;
    if (event.key === "Escape") return event.stopPropagation(), leave();
    if (event.key === "Enter" && !event.shiftKey && message.role === "user") submit(event);
  };
  field.addEventListener("input", () => {
    keepTyped(name, [field.value]);
    grow(field);
  });
  const yes = el("button", { class: "primary" }, message.role === "user" ? "Send" : "Save");
  const form = el("form", { class: "editor", on: { submit, keydown } }, field, el("div", { class: "row" }, button("Cancel", leave), yes));
  return [form, field];
}

// As high as its text; the style sheet has the limit.
export function grow(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + field.offsetHeight - field.clientHeight}px`;
}
