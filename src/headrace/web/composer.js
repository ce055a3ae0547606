// The message being written: one draft per conversation. Its text outlives the page, its pictures
// do not.

import { imagesIn, readImage, thumbnails } from "./images.js";
import { forgetTyped, keepTyped, typed } from "./typed.js";

const field = document.getElementById("input");
const strip = document.getElementById("attached");
const pictures = new Map(); // by the name of the draft
let shown = ""; // the name of the draft in the field

const nameOf = (conversation) => `draft-${conversation ?? "new"}`;
const attached = (name = shown) => pictures.get(name) ?? [];

// Shows the draft of a conversation; of null, that of the one to come.
export function showDraft(conversation) {
  if (shown === nameOf(conversation)) return;
  shown = nameOf(conversation);
  field.value = typed(shown)?.[0] ?? "";
  grow();
  showPictures();
}

// The draft as {text, images}, which is forgotten; null where there is nothing to send.
export function takeDraft() {
  const draft = { text: field.value, images: attached() };
  if (!draft.text.trim() && !draft.images.length) return null;
  field.value = "";
  forgetTyped(shown);
  pictures.delete(shown);
  grow();
  showPictures();
  return draft;
}

export function forgetDraft(conversation) {
  forgetTyped(nameOf(conversation));
  pictures.delete(nameOf(conversation));
}

// Takes the pictures among the files to the draft. Throws where one cannot be read.
export async function attach(files) {
  const name = shown; // another may be shown before they are read
  const read = await Promise.all(imagesIn(files).map(readImage));
  pictures.set(name, [...attached(name), ...read]);
  showPictures();
}

function showPictures() {
  const images = attached();
  strip.hidden = !images.length;
  strip.replaceChildren(...thumbnails(images, (k) => {
    pictures.set(shown, images.filter((_, other) => other !== k));
    showPictures();
    field.focus();
  }));
}

// As high as its text; the style sheet has the limit.
function grow() {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + field.offsetHeight - field.clientHeight}px`;
}

field.addEventListener("input", () => {
  keepTyped(shown, [field.value]);
  grow();
});
addEventListener("resize", grow);
