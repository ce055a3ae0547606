// Pictures for a message: read, scaled down if they are large, and kept as data URIs.

import { el } from "./dom.js";

const MAX_BYTES = 1_000_000; // bytes of a file that is sent unchanged
const MAX_SIDE = 1600; // pixels of a picture that is scaled down
const URI = /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+=*$/;

export const isImage = (uri) => typeof uri === "string" && URI.test(uri);

export async function readImage(file) {
  const isPlain = /^image\/(png|jpeg|webp|gif)$/.test(file.type);
  const uri = isPlain && file.size <= MAX_BYTES ? await asUri(file) : await smaller(file);
  if (!isImage(uri)) throw new Error();
  return uri;
}

function asUri(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

async function smaller(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = el("canvas", { width: Math.round(bitmap.width * scale), height: Math.round(bitmap.height * scale) });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

export const thumbnails = (uris) => uris.map((uri, k) => el("span", { class: "thumb" }, el("img", { src: uri, alt: `Attached image ${k + 1}` })));
