// Makes elements. Text becomes text nodes, never HTML.

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

export function button(label, act, attributes = {}) {
  return el("button", { type: "button", on: { click: act }, ...attributes }, label);
}

// Returns a random id. crypto.randomUUID would do, but browsers offer it only for https and localhost.
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Browsers offer the clipboard only for https and localhost.
  const focused = document.activeElement;
  const area = el("textarea", { class: "unseen" });
  area.value = text;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  focused?.focus({ preventScroll: true });
  if (!isCopied) throw new Error("The browser does not allow copying.");
}

export function copyButton(label, text) {
  const made = button("Copy", async () => {
    try {
      await copy(text());
      made.textContent = "Copied";
    } catch {
      made.textContent = "Not allowed";
    }
    setTimeout(() => (made.textContent = "Copy"), 1500);
  }, { "aria-label": label });
  return made;
}

// Lets the page react to events. Unlike a timer, a message is not delayed while the page is hidden.
export function breathe() {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => resolve(port1.close());
    port2.postMessage(null);
  });
}

export function duration(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  return `${Math.round(seconds / 60)} min`;
}
