// A menu that opens at its button. Arrow keys move in it; Escape, Tab and a click elsewhere close it.

import { el } from "./dom.js";
import { icon } from "./icons.js";

const GAP = 4; // pixels from the button, and from the edges of the window

// `items` are arrays of [name of the icon, words, act, whether it destroys something].
export function openMenu(anchor, items) {
  const buttons = items.map(([drawing, words, act, isBad]) =>
    el("button", { type: "button", role: "menuitem", tabindex: "-1", class: isBad ? "bad" : null, on: { click: () => (menu.hidePopover(), act()) } }, icon(drawing), words));
  const menu = el("div", { role: "menu", class: "popup", popover: "auto", "aria-label": anchor.getAttribute("aria-label") }, ...buttons);
  menu.addEventListener("keydown", (event) => {
    const at = buttons.indexOf(document.activeElement);
    const next = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: -1 }[event.key];
    if (event.key === "Tab") menu.hidePopover();
    if (next === undefined) return;
    event.preventDefault();
    buttons.at(next % buttons.length).focus();
  });
  menu.addEventListener("toggle", ({ newState }) => {
    anchor.setAttribute("aria-expanded", String(newState === "open"));
    if (newState === "closed") menu.remove();
  });
  anchor.closest("dialog, nav, main").append(menu);
  menu.showPopover();
  place(menu, anchor.getBoundingClientRect());
  buttons[0].focus();
}

function place(menu, { left, top, bottom }) {
  const { offsetWidth: width, offsetHeight: height } = menu;
  const isBelow = bottom + GAP + height < innerHeight;
  menu.style.left = `${Math.max(GAP, Math.min(left, innerWidth - width - GAP))}px`;
  menu.style.top = `${isBelow ? bottom + GAP : Math.max(GAP, top - GAP - height)}px`;
}
