// The text of a PDF, by pdf.js, which is loaded only when there is one to read.

const WORKER = "./vendor/pdf.worker.js";

export async function textOfPdf(data) {
  const { getDocument, GlobalWorkerOptions, PDFWorker } = await import("./vendor/pdf.js");
  GlobalWorkerOptions.workerSrc = new URL(WORKER, import.meta.url).href;
  const worker = new PDFWorker({ port: globalThis.trustedTypes ? await portHere() : null, verbosity: 0 });
  const task = getDocument({ data, worker, disableFontFace: true, useSystemFonts: false, useWasm: false, useWorkerFetch: false, isEvalSupported: false, verbosity: 0 });
  try {
    const pdf = await task.promise;
    const texts = [];
    for (let number = 1; number <= pdf.numPages; number++) texts.push(await textOfPage(await pdf.getPage(number)));
    return { text: texts.join("\n\n"), pages: pdf.numPages };
  } finally {
    await task.destroy();
    worker.destroy();
  }
}

// NOTE: our policy names no trusted types, so a browser that heeds it makes no worker at all: PDFs are
// then read in the page. Each message over a channel is a task of its own, so that it stays quick;
// pdf.js's own way, by promises, is one task from the first to the last page.
async function portHere() {
  const { WorkerMessageHandler } = await import(WORKER);
  const { port1, port2 } = new MessageChannel();
  WorkerMessageHandler.initializeFromPort(port2);
  for (const port of [port1, port2]) port.start();
  return port1;
}

async function textOfPage(page) {
  const { items } = await page.getTextContent();
  page.cleanup();
  return items.map(({ str, hasEOL }) => (str ?? "") + (hasEOL ? "\n" : "")).join("").trim();
}
