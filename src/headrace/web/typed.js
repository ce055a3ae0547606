// Keeps text that a person has typed and not sent yet, in localStorage: results of tool calls by the id of the
// calling message, and drafts by their names.

const name = (id) => `headrace-typed-${id}`;

export function typed(id) {
  try {
    const texts = JSON.parse(localStorage.getItem(name(id)));
    return Array.isArray(texts) && texts.every((text) => typeof text === "string") ? texts : null;
  } catch {
    return null;
  }
}

export function keepTyped(id, texts) {
  try {
    if (texts.some(Boolean)) localStorage.setItem(name(id), JSON.stringify(texts));
    else localStorage.removeItem(name(id));
  } catch {
    // If the storage is full, the text is kept on the screen alone.
  }
}

export const forgetTyped = (id) => localStorage.removeItem(name(id));
