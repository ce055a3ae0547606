// What the person chose: the key, and the choices that a new conversation begins with, in
// localStorage. Each conversation keeps its own choices after that.

const NAME = "headrace-settings";
export const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
const CHOICES = ["model", "system", "tools", ...NUMBERS];

// Strings alone, each from a field of the form.
export function choicesOf(given) {
  const known = CHOICES.filter((name) => typeof given?.[name] === "string" && given[name]);
  return Object.fromEntries(known.map((name) => [name, given[name]]));
}

export function settings() {
  try {
    return { key: "", ...JSON.parse(localStorage.getItem(NAME) ?? "{}") };
  } catch {
    return { key: "" };
  }
}

export function saveSettings(changed) {
  localStorage.setItem(NAME, JSON.stringify({ ...settings(), ...changed }));
}

export const defaults = () => choicesOf(settings());

// What is wrong with the tools as they were typed, or nothing.
export function faultOf({ tools }) {
  try {
    return !tools || Array.isArray(JSON.parse(tools)) ? "" : "Tools must be a JSON array.";
  } catch {
    return "Tools must be a JSON array.";
  }
}

// The fields of a request that differ from the model's own.
export function sampling(chosen) {
  const fields = {};
  for (const name of NUMBERS) if (chosen[name]) fields[name] = Number(chosen[name]);
  if (chosen.tools && !faultOf(chosen)) fields.tools = JSON.parse(chosen.tools);
  if (chosen.model) fields.model = chosen.model;
  return fields;
}
