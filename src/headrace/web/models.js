// The models that the server offers, as a list to choose from in the head of the chat.

import { ask, errorOf } from "./api.js";
import { el } from "./dom.js";

let models = []; // {id, parent, state, stage, share, context, takesImages, about, starters}
const STATES = { loaded: "", unloaded: " (not loaded)", loading: " (loading)", failed: " (failed)" };

// Asks the server anew. Returns its error, if it had one.
export async function loadModels() {
  const response = await ask("/v1/models");
  if (!response.ok) return { status: response.status, ...(await errorOf(response)) };
  const { data } = await response.json();
  // an alias is for programs that know no other name
  models = data.filter((one) => !one.alias_of).map(({ id, parent, status, architecture, max_model_len: length, description, suggestions }) => ({
    id,
    parent, // the model that an adapter changes
    state: status?.failed ? "failed" : status?.value ?? "loaded",
    stage: status?.stage,
    share: status?.progress ?? (status?.bytes_total ? status.bytes_done / status.bytes_total : null),
    // of a model that has not been read yet nobody knows: the server will say
    context: length,
    takesImages: architecture?.input_modalities?.includes("image") ?? true,
    about: description, // the server's description of the model, for people
    starters: suggestions, // prompts that it answers well, if it cannot answer the general ones
  }));
  return null;
}

// The model that a conversation speaks to: the one it remembers, else the server's first.
export const modelOf = (choices) => choices.model || models[0]?.id || "";

const properties = new Map(); // of loaded models, by their names

async function propertiesOf(id) {
  if (properties.has(id)) return properties.get(id);
  if (models.find((one) => one.id === id)?.state !== "loaded") return null;
  const response = await ask(`/props?model=${encodeURIComponent(id)}`);
  if (response.ok) properties.set(id, await response.json());
  return properties.get(id);
}

// What a loaded model draws by where a request says nothing, by the names of the fields.
export const drawnBy = async (id) => (await propertiesOf(id))?.default_generation_settings.params ?? {};

// What is known of a model, for people. A template that speaks of tools or of thoughts shows that
// the model was trained for them.
export function knownOf(id) {
  const model = models.find((one) => one.id === id);
  if (!model) return null;
  const { chat_template: template = "", default_generation_settings: settings } = properties.get(id) ?? {};
  return { ...model, context: settings?.n_ctx ?? model.context, sees: model.takesImages, calls: /\btools\b/.test(template), thinks: /enable_thinking|<think>/.test(template) };
}

// Asks for what is not known yet; says whether there is more now.
export async function learn(id) {
  return !properties.has(id) && Boolean(await propertiesOf(id).catch(() => null));
}

// The names of the others, where there are several.
export const others = (id) => (models.length > 1 ? models.map((one) => one.id).filter((other) => other !== id) : []);

export const isOneOfSeveral = () => models.length > 1;

// What to say while a model is being loaded, or nothing.
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
  const text = JSON.stringify(shown);
  if (select.dataset.shown !== text) select.replaceChildren(...shown.map(([value, label]) => el("option", { value }, label)));
  select.dataset.shown = text;
  select.value = chosen;
  select.hidden = !shown.length;
}
