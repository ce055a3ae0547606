// The message that is being written, one draft per conversation. Its text and files survive a reload of the page.

import { button, el } from "./dom.js";
import { keepFiles, keptFiles } from "./drafts.js";
import { grow } from "./edit.js";
import { sizeOf } from "./files.js";
import { icon } from "./icons.js";
import { forgetTyped, keepTyped, typed } from "./typed.js";

const field = document.getElementById("input");
const strip = document.getElementById("attached");
// By the name of the draft.
const files = new Map();
// Files that are being read, as {draft, label, read}.
const reading = new Set();
// By file.
const shownFigures = new WeakMap();
// The name of the draft in the field.
let shown = "";
let changed = () => {};

const nameOf = (conversation) => `draft-${conversation ?? "new"}`;
const attached = (name = shown) => files.get(name) ?? [];

// `act` is called after each change of the draft in view.
export const onDraft = (act) => (changed = act);

// Shows the draft of a conversation, or of a new one if null.
export async function showDraft(conversation) {
  const name = nameOf(conversation);
  if (shown === name) return;
  // Text that was typed while the page was loading follows the stored draft.
  const early = shown ? "" : field.value;
  shown = name;
  fill((typed(shown)?.[0] ?? "") + early);
  if (early) keepTyped(shown, [field.value]);
  if (!files.has(name)) {
    const kept = await keptFiles(name).catch(() => []);
    files.set(name, [...kept, ...attached(name)]);
  }
  showFiles();
}

// Returns the current draft as {text, files}.
export const draft = () => ({ text: field.value, files: attached() });

// Takes the draft out of the field and returns it.
//
// Call `settle` once the draft is saved elsewhere; until then it survives a lost page. Call `giveBack` if it
// cannot be saved.
export function takeDraft() {
  const [name, taken] = [shown, draft()];
  fill("");
  files.set(name, []);
  showFiles();
  const settle = () => {
    if (typed(name)?.[0] === taken.text) forgetTyped(name);
    keepFiles(name, attached(name));
  };
  const giveBack = () => {
    setFiles(name, [...taken.files, ...attached(name)]);
    if (name === shown && !field.value) fill(taken.text);
  };
  return { ...taken, settle, giveBack };
}

// Puts a message that was sent back before the draft in view.
export function putBack(text, given) {
  setFiles(shown, [...given, ...attached()]);
  setText([text, field.value].filter((one) => one.trim()).join("\n\n"));
}

export function forgetDraft(conversation) {
  const name = nameOf(conversation);
  forgetTyped(name);
  files.delete(name);
  keepFiles(name, []).catch(() => {});
}

// `read` is a promise of the file. It may resolve while another draft is shown.
export async function attach(label, read) {
  const one = { draft: shown, label, read };
  reading.add(one);
  showFiles();
  try {
    const file = await read;
    setFiles(one.draft, [...attached(one.draft), file]);
  } finally {
    reading.delete(one);
    showFiles();
  }
}

const readNow = () => [...reading].filter(({ draft }) => draft === shown);

export const isReading = () => readNow().length > 0;

// Returns whether all files could be read while the same draft is shown.
export async function areRead() {
  const name = shown;
  const all = await Promise.allSettled(readNow().map(({ read }) => read));
  return name === shown && all.every(({ status }) => status === "fulfilled");
}

function setFiles(name, all) {
  files.set(name, all);
  // If the browser's storage is full, the files are kept on the screen alone.
  keepFiles(name, all).catch(() => {});
  if (name === shown) showFiles();
}

// Puts a text into the field, as if it had been typed.
export function setText(text) {
  keepTyped(shown, [text]);
  fill(text);
  field.focus();
}

function fill(text) {
  field.value = text;
  grow(field);
  changed();
}

function showFiles() {
  strip.hidden = !attached().length && !readNow().length;
  strip.replaceChildren(...attached().map(chip), ...readNow().map(({ label }) => el("span", { class: "chip" }, icon("file"), about(label, el("span", { class: "soft" }, "Reading")))));
  changed();
}

const about = (name, figures) => el("span", { class: "about" }, el("span", { class: "name", title: name }, name), figures);
const figuresOf = (file) => (file.num ? `${sizeOf(file)}, ${file.num.toLocaleString("en")} tokens` : sizeOf(file));

function chip(file) {
  const remove = () => {
    setFiles(shown, attached().filter((other) => other !== file));
    field.focus();
  };
  const face = file.kind === "image" ? el("img", { src: file.url, alt: "" }) : icon("file");
  const figures = el("span", { class: "soft" }, figuresOf(file));
  shownFigures.set(file, figures);
  return el("span", { class: `chip ${file.kind}` }, face, about(file.name, figures), button(icon("close"), remove, { class: "plain", "aria-label": `Remove ${file.name}` }));
}

// Sets the number of a file's tokens, once they have been counted for a model.
export function setTokens(file, num, model) {
  Object.assign(file, { num, countedBy: model });
  for (const name of files.keys()) if (attached(name).includes(file)) keepFiles(name, attached(name)).catch(() => {});
  if (shownFigures.has(file)) shownFigures.get(file).textContent = figuresOf(file);
}

field.addEventListener("input", () => {
  if (shown) keepTyped(shown, [field.value]);
  grow(field);
  changed();
});
addEventListener("resize", () => grow(field));
