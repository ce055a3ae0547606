// The models of the server, and the list in the head of the chat to choose one.

import { ask, errorOf } from "./api.js";
import { el } from "./dom.js";

// Objects of {id, parent, state, stage, share, context, takesImages, about, starters}.
let models = [];
// Whether the server has listed its models.
let isListed = false;
// The value of the entry that leads to the download of a model. No model has this name.
export const GET = " get";
const STATES = { loaded: "", unloaded: " (not loaded)", loading: " (loading)", failed: " (failed)" };

// Fetches the models. Returns the server's error, if there is one.
export async function loadModels() {
  const response = await ask("/v1/models");
  if (!response.ok) return { status: response.status, ...(await errorOf(response)) };
  const { data } = await response.json();
  isListed = true;
  // An alias is for programs that know no other name.
  models = data.filter((one) => !one.alias_of).map(({ id, parent, status, architecture, max_model_len: length, description, suggestions }) => ({
    id,
    // The model that an adapter changes.
    parent,
    state: status?.failed ? "failed" : status?.value ?? "loaded",
    stage: status?.stage,
    share: status?.progress ?? (status?.bytes_total ? status.bytes_done / status.bytes_total : null),
    // Both are unknown for a model that was never read. The server then refuses images if it has to.
    context: length,
    takesImages: architecture?.input_modalities?.includes("image") ?? true,
    // The server's description of the model, for people.
    about: description,
    // Prompts that suit the model, if the general ones do not.
    starters: suggestions,
  }));
  return null;
}

// Returns the model that a conversation talks to: its own choice, or the server's first model.
export const modelOf = (choices) => choices.model || models[0]?.id || "";

// The properties of loaded models, by name.
const properties = new Map();

async function propertiesOf(id) {
  if (properties.has(id)) return properties.get(id);
  if (models.find((one) => one.id === id)?.state !== "loaded") return null;
  const response = await ask(`/props?model=${encodeURIComponent(id)}`);
  if (response.ok) properties.set(id, await response.json());
  return properties.get(id);
}

// Returns the sampling values that a loaded model uses for missing fields, by the names of the fields.
export const drawnBy = async (id) => (await propertiesOf(id))?.default_generation_settings.params ?? {};

const NONE = { id: "No model yet", about: "This server has no model to answer with.", starters: [] };

// Returns what is known of a model, to be shown. If its template mentions tools or thoughts, the model was trained
// for them.
export function knownOf(id) {
  const model = models.find((one) => one.id === id);
  if (!model) return hasNone() ? NONE : null;
  const { chat_template: template = "", default_generation_settings: settings } = properties.get(id) ?? {};
  return { ...model, context: settings?.n_ctx ?? model.context, sees: model.takesImages, calls: /\btools\b/.test(template), thinks: /enable_thinking|<think>/.test(template) };
}

// Fetches what is not known yet; returns whether more is known now.
export async function learn(id) {
  return !properties.has(id) && Boolean(await propertiesOf(id).catch(() => null));
}

// Returns whether a model is known to write no answers: it computes vectors or scores.
export const isSilent = (id) => models.find((one) => one.id === id)?.starters?.length === 0;

// Returns the names of the other models, if there are several.
export const others = (id) => (models.length > 1 ? models.map((one) => one.id).filter((other) => other !== id) : []);

// Returns whether the server has listed its models and none is among them.
export const hasNone = () => isListed && !models.length;

export const isOneOfSeveral = () => models.length > 1;

// Returns a text while a model is loading, or "".
export function loadingOf(id) {
  const { state, stage, share } = models.find((one) => one.id === id) ?? {};
  if (state !== "loading") return "";
  const figures = [stage, share === null ? "" : `${Math.round(100 * share)} %`].filter(Boolean).join(", ");
  return `Loading the model ${id}${figures && `: ${figures}`}`;
}

export const takesImages = (id) => Boolean(models.find((one) => one.id === id)?.takesImages);

export function showModels(select, chosen) {
  const shown = models.map(({ id, parent, state }) => [id, `${id}${parent ? ` (adapter of ${parent})` : ""}${STATES[state] ?? ` (${state})`}`]);
  if (chosen && models.length && !models.some(({ id }) => id === chosen)) shown.push([chosen, `${chosen} (not served)`]);
  if (!shown.length) shown.push(["", "No model"]);
  shown.push([GET, "Get a model…"]);
  const text = JSON.stringify(shown);
  if (select.dataset.shown !== text) select.replaceChildren(...shown.map(([value, label]) => el("option", { value }, label)));
  select.dataset.shown = text;
  select.value = select.title = chosen;
  select.hidden = !isListed;
}
