// The keyboard shortcuts, and the list that explains them.

import { el } from "./dom.js";

// Each shortcut: [keys as shown, words, whether an event matches it]. Those without a test are handled where they
// apply.
const isCommand = ({ ctrlKey, metaKey, altKey }) => (ctrlKey || metaKey) && !altKey;
const SHORTCUTS = {
  create: [["Ctrl", "Shift", "O"], "New conversation", (event) => isCommand(event) && event.shiftKey && event.code === "KeyO"],
  search: [["Ctrl", "K"], "Search", (event) => isCommand(event) && !event.shiftKey && event.code === "KeyK"],
  list: [["Ctrl", "/"], "Show this list", (event) => isCommand(event) && event.key === "/"],
  focus: [["Shift", "Escape"], "Go to the message field", (event) => event.shiftKey && event.key === "Escape"],
  stop: [["Escape"], "Stop the answer"],
  edit: [["↑"], "Edit your last message, if the message field is empty"],
  send: [["Enter"], "Send"],
  line: [["Shift", "Enter"], "New line"],
};
const isMac = /Mac|iPhone|iPad/.test(navigator.platform);
const named = (key) => (isMac && key === "Ctrl" ? "⌘" : key);

// `acts` has the action of each shortcut, by name.
export function listen(acts) {
  addEventListener("keydown", (event) => {
    if (event.isComposing || document.querySelector("dialog[open]")) return;
    for (const [name, act] of Object.entries(acts)) {
      if (!SHORTCUTS[name][2](event)) continue;
      event.preventDefault();
      act();
    }
  });
}

export function showShortcuts(dialog) {
  const rows = Object.values(SHORTCUTS).map(([keys, words]) => el("div", {}, el("dt", {}, ...keys.map((key) => el("kbd", {}, named(key)))), el("dd", {}, words)));
  dialog.querySelector("dl").replaceChildren(...rows);
  dialog.showModal();
}
