// Renames a conversation in place: a field covers the name, which stays in the page since others may change it.

import { el } from "./dom.js";

// `keep` is called with the new name. Escape or an empty name keeps the old one.
export function renameIn(place, name, keep) {
  const field = el("input", { class: "rename", "aria-label": "Name of the conversation", maxlength: "200", autocomplete: "off" });
  let isOver = false;
  const end = (isKept) => {
    if (isOver) return;
    isOver = true;
    place.hidden = false;
    field.remove();
    const given = field.value.trim().replace(/\s+/g, " ");
    if (isKept && given && given !== name) keep(given);
  };
  field.value = name;
  field.addEventListener("blur", () => end(true));
  field.addEventListener("keydown", (event) => {
    if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
    event.stopPropagation();
    event.preventDefault();
    end(event.key === "Enter");
    place.focus();
  });
  place.hidden = true;
  place.before(field);
  field.focus();
  field.select();
}
