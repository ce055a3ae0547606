// Edits a message in its place. The typed text survives a reload of the page.

import { button, el } from "./dom.js";
import { forgetTyped, keepTyped, typed } from "./typed.js";

const nameOf = (message) => `edit-${message.id}`;

export const isBeingEdited = (message) => typed(nameOf(message)) !== null;

// Returns the form and its field. `take` is called with the new text, `close` if the person cancels.
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

// Makes the field as high as its text, up to the limit of the style sheet.
export function grow(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + field.offsetHeight - field.clientHeight}px`;
}
