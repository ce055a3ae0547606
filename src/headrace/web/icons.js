// Icons, drawn with strokes on a square of 24 by 24. A button in the HTML names its icon in data-icon.

const PATHS = {
  search: "M11 4a7 7 0 1 1 0 14a7 7 0 0 1 0-14M16.2 16.2L21 21",
  menu: "M4 7h16M4 12h16M4 17h16",
  close: "M6 6l12 12M18 6L6 18",
  more: "M5 12h.01M12 12h.01M19 12h.01",
  edit: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3",
  trash: "M4 7h16M9 7V4h6v3M6.5 7l1 13h9l1-13M10 11v5M14 11v5",
  save: "M12 4v11M7.5 10.5L12 15l4.5-4.5M5 20h14",
  open: "M12 15V4M7.5 8.5L12 4l4.5 4.5M5 20h14",
  options: "M4 8h9M19 8h1M4 16h1M11 16h9M16 5.5a2.5 2.5 0 1 1 0 5a2.5 2.5 0 0 1 0-5M8 13.5a2.5 2.5 0 1 1 0 5a2.5 2.5 0 0 1 0-5",
  chart: "M4 20h16M7 20v-7M12 20V6M17 20v-10",
  keyboard: "M3 7h18v10H3zM7 10.5h.01M10.3 10.5h.01M13.7 10.5h.01M17 10.5h.01M8 13.8h8",
  send: "M12 19V5M6 11l6-6l6 6",
  stop: "M7.5 7.5h9v9h-9z",
  clip: "M20 11.5l-8 8a5 5 0 0 1-7.1-7.1l8.3-8.3a3.4 3.4 0 0 1 4.8 4.8l-8.2 8.2a1.7 1.7 0 0 1-2.4-2.4l7.4-7.4",
  again: "M20 11a8 8 0 1 0-2.3 5.7M20 4v7h-7",
  file: "M6 3h8l5 5v13H6zM14 3v5h5",
};
const NAMESPACE = "http://www.w3.org/2000/svg";

export function icon(name) {
  const drawing = document.createElementNS(NAMESPACE, "svg");
  const path = document.createElementNS(NAMESPACE, "path");
  for (const [key, value] of Object.entries({ viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" })) drawing.setAttribute(key, value);
  path.setAttribute("d", PATHS[name]);
  drawing.append(path);
  return drawing;
}

export function drawIcons() {
  for (const node of document.querySelectorAll("[data-icon]")) node.prepend(icon(node.dataset.icon));
}
