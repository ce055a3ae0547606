// The text of a PDF, by pdf.js, which is loaded only when there is one to read.

import { breathe } from "./dom.js";

const WORKER = "./vendor/pdf.worker.js";

export async function textOfPdf(data) {
  const { getDocument, GlobalWorkerOptions } = await import("./vendor/pdf.js");
  GlobalWorkerOptions.workerSrc = new URL(WORKER, import.meta.url).href;
  // NOTE: our policy names no trusted types, so a browser that heeds it makes no worker at all: the
  // pages are then read here, one at a time.
  if (globalThis.trustedTypes) globalThis.pdfjsWorker ??= await import(WORKER);
  const task = getDocument({ data, disableFontFace: true, useSystemFonts: false, useWasm: false, useWorkerFetch: false, isEvalSupported: false, verbosity: 0 });
  try {
    const pdf = await task.promise;
    const texts = [];
    for (let number = 1; number <= pdf.numPages; number++) {
      texts.push(await textOfPage(await pdf.getPage(number)));
      await breathe();
    }
    return { text: texts.join("\n\n"), pages: pdf.numPages };
  } finally {
    task.destroy();
  }
}

async function textOfPage(page) {
  const { items } = await page.getTextContent();
  page.cleanup();
  return items.map(({ str, hasEOL }) => (str ?? "") + (hasEOL ? "\n" : "")).join("").trim();
}
