// What a person has typed as the results of tool calls and not sent yet: texts by the message that
// calls, in localStorage.

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
    // no room is left: it is kept on the screen alone
  }
}

export const forgetTyped = (id) => localStorage.removeItem(name(id));
