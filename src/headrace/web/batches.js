// The batches of this key: shows their progress, stops them, and downloads their results.

import { ask, errorOf } from "./api.js";
import { button, el } from "./dom.js";

const $ = (id) => document.getElementById(id);
const LOOK_MS = 2000;
const MAX_ROWS = 100;
const ENDED = ["completed", "failed", "expired", "cancelled", "ended"];

const rest = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

// Returns the answer as JSON, or throws an error that says why there is none.
async function asked(path, options) {
  const response = await ask(path, options);
  if (!response.ok) throw new Error((await errorOf(response)).message);
  return response.json();
}

// Returns the rows of both APIs in one format.
function ofFile(batch) {
  const { total, completed, failed } = batch.request_counts;
  const files = [batch.output_file_id, batch.error_file_id].filter(Boolean);
  return {
    id: batch.id, name: batch.metadata?.file ?? batch.id, begun: batch.created_at * 1000, state: batch.status,
    total, done: completed + failed, failed, fault: faultOf(batch.errors?.data[0]),
    cancel: `/v1/batches/${batch.id}/cancel`, results: files.map((id) => `/v1/files/${id}/content`),
  };
}

function ofMessages(batch) {
  const { processing, succeeded, ...others } = batch.request_counts;
  const failed = Object.values(others).reduce((sum, number) => sum + number, 0);
  return {
    id: batch.id, name: batch.id, begun: Date.parse(batch.created_at), state: batch.processing_status,
    total: processing + succeeded + failed, done: succeeded + failed, failed, fault: "",
    cancel: `/v1/messages/batches/${batch.id}/cancel`,
    results: batch.results_url ? [`/v1/messages/batches/${batch.id}/results`] : [],
  };
}

const faultOf = (fault) => (fault ? `Line ${fault.line}: ${fault.message}` : "");

function row(batch) {
  const progress = el("progress", { max: batch.total || 1, value: batch.done, "aria-label": `Progress of ${batch.name}` });
  const isOver = ENDED.includes(batch.state);
  // On a phone, a row takes two lines. These roles keep the rows a table for screen readers.
  const cell = (name, more, ...inner) => el("td", { role: "cell", class: name, ...more }, ...inner);
  return el("tr", { role: "row", "data-id": batch.id },
    cell("what", { title: batch.id }, batch.name, batch.fault ? el("div", { class: "trouble" }, batch.fault) : null),
    cell("state", {}, batch.state.replace("_", " ")),
    cell("done", {}, el("div", { class: "progress" }, progress, el("span", {}, `${batch.done} of ${batch.total}`))),
    cell("failed", {}, String(batch.failed)),
    cell("begun", {}, new Date(batch.begun).toLocaleString([], { dateStyle: "medium", timeStyle: "short" })),
    cell("acts", {},
      isOver || batch.state.startsWith("cancel") ? null : button("Stop", () => act(() => asked(batch.cancel, { method: "POST" })), { "aria-label": `Stop ${batch.name}` }),
      batch.results.length ? button("Download", () => act(() => download(batch)), { "aria-label": `Download the results of ${batch.name}` }) : null));
}

async function act(work) {
  try {
    $("news").textContent = "";
    await work();
    await look();
  } catch (error) {
    $("news").textContent = error.message;
  }
}

// Downloads by fetch, since a link cannot send a key.
async function download(batch) {
  const parts = [];
  for (const path of batch.results) {
    const response = await ask(path);
    if (!response.ok) throw new Error((await errorOf(response)).message);
    parts.push(await response.blob());
  }
  const link = el("a", { href: URL.createObjectURL(new Blob(parts)), download: `${batch.name.replace(/\.jsonl$/, "")}.results.jsonl` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

// Takes the url of the first line for all lines, since a batch has one endpoint.
async function send(file) {
  const first = (await file.slice(0, 1 << 20).text()).split("\n").find((line) => line.trim()) ?? "";
  let endpoint;
  try {
    endpoint = JSON.parse(first).url;
  } catch {
    endpoint = null;
  }
  if (typeof endpoint !== "string") throw new Error("The first line of this file is not a request: it has no url.");
  const form = new FormData();
  form.append("purpose", "batch");
  form.append("file", file);
  const sent = await asked("/v1/files", { method: "POST", body: form });
  const wish = { input_file_id: sent.id, endpoint, completion_window: "24h", metadata: { file: file.name.slice(0, 512) } };
  await asked("/v1/batches", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(wish) });
}

async function look() {
  const [files, messages] = await Promise.all(["/v1/batches", "/v1/messages/batches"].map((path) => asked(`${path}?limit=${MAX_ROWS}`)));
  const batches = [...files.data.map(ofFile), ...messages.data.map(ofMessages)].sort((a, b) => b.begun - a.begun);
  $("batches").parentElement.hidden = !batches.length;
  $("none").hidden = batches.length > 0;
  const key = JSON.stringify(batches);
  // Redrawing would take the focus away from a button.
  if (key === shown) return;
  shown = key;
  $("batches").tBodies[0].replaceChildren(...batches.map(row));
}

let shown = "";
$("send").addEventListener("click", () => $("given").click());
$("given").addEventListener("change", () => {
  const [file] = $("given").files;
  $("given").value = "";
  if (file) act(() => send(file));
});
for (;; await rest(LOOK_MS)) {
  if (document.hidden) continue;
  try {
    await look();
    if ($("news").dataset.away) $("news").textContent = "";
    delete $("news").dataset.away;
  } catch (error) {
    $("news").dataset.away = "yes";
    $("news").textContent = error instanceof TypeError ? "The server cannot be reached; trying again." : error.message;
  }
}
