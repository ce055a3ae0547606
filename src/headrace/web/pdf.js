// Extracts the text of a PDF with pdf.js, which is loaded only when a PDF is read.

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

// The page's policy allows no trusted types, so browsers that enforce it cannot create the worker. They read PDFs
// in the page instead, through a message channel. Each message is a task of its own, so the page stays responsive;
// the promises that pdf.js would use make one task of all pages.
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
