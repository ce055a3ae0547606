// Files for a message: {kind, name, size} with the url of an image, or the text of any other file.

import { el } from "./dom.js";
import { icon } from "./icons.js";
import { readImage } from "./images.js";

const MAX_TEXT_BYTES = 4_000_000;
const MAX_PDF_BYTES = 50_000_000;
// Control characters that no text has, in any encoding.
const CONTROL = /[\0-\x08\x0e-\x1a\x1c-\x1f]/;

// Reads a file; throws an error with a text for the person if that fails. `sees` says whether the model takes
// images.
export async function readFile(file, model, sees) {
  const about = { name: file.name || "Pasted", size: file.size };
  if (file.type.startsWith("image/")) {
    if (!sees) throw new Error(`The model ${model} does not accept images.`);
    return { kind: "image", ...about, url: await readImage(file).catch(() => refuse(`${about.name} is not an image that this browser can show.`)) };
  }
  const isPdf = file.type === "application/pdf" || /\.pdf$/i.test(file.name);
  const most = isPdf ? MAX_PDF_BYTES : MAX_TEXT_BYTES;
  if (file.size > most) refuse(`${about.name} has ${bytes(file.size)}; the limit is ${bytes(most)}. Send a part of it.`);
  const read = isPdf ? await pdfText(file, about.name) : plainText(new Uint8Array(await file.arrayBuffer()), about.name);
  return { kind: "text", ...about, ...read };
}

const counted = (pages) => `${pages} page${pages === 1 ? "" : "s"}`;

function refuse(words) {
  throw new Error(words);
}

async function pdfText(file, name) {
  const { textOfPdf } = await import("./pdf.js");
  const read = await textOfPdf(await file.arrayBuffer()).catch((error) => refuse(error.name === "PasswordException" ? `${name} is locked by a password.` : `${name} cannot be read as a PDF.`));
  if (!read.text.trim()) refuse(`${name} has no text: ${read.pages === 1 ? "its page is a picture" : `its ${read.pages} pages are pictures`}.`);
  return read;
}

function plainText(data, name) {
  const encodings = { "255 254": "utf-16le", "254 255": "utf-16be" };
  for (const encoding of [encodings[`${data[0]} ${data[1]}`] ?? "utf-8", "windows-1252"]) {
    try {
      const text = new TextDecoder(encoding, { fatal: true }).decode(data);
      if (!CONTROL.test(text)) return { text };
    } catch {
      // The data is not in this encoding.
    }
  }
  return refuse(`${name} is neither text, PDF nor image. Save it as one of these.`);
}

// Returns a file as the model reads it.
export function asText({ name, text, pages }) {
  const language = pages ? "" : /\.(\w+)$/.exec(name)?.[1] ?? "";
  return `File ${name}${pages ? ` (${counted(pages)})` : ""}:\n${fenced(text, language)}`;
}

// Puts text into a block of code, with a fence that is longer than any in the text.
export function fenced(text, language = "") {
  let length = 2;
  for (const [ticks] of text.matchAll(/`{3,}/g)) length = Math.max(length, ticks.length);
  const fence = "`".repeat(length + 1);
  return `${fence}${language}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}

export function bytes(size) {
  if (size < 1000) return `${size} B`;
  if (size < 1e6) return `${Math.round(size / 1e3)} kB`;
  return size < 1e9 ? `${(size / 1e6).toFixed(1)} MB` : `${(size / 1e9).toFixed(1)} GB`;
}

// Shows the files of a sent message; each opens to its text.
export const shownFiles = (files) => files.map((file) => {
  const pre = el("pre", { tabindex: "0" });
  const open = () => (pre.textContent ||= file.text);
  return el("details", { class: "file", on: { toggle: open } }, el("summary", {}, icon("file"), el("span", { class: "name", title: file.name }, file.name), el("span", { class: "soft" }, sizeOf(file))), pre);
});

export const sizeOf = ({ size, pages }) => [pages && counted(pages), bytes(size)].filter(Boolean).join(", ");
