// The person's settings in localStorage: the key, and the options that a new conversation begins with. Each
// conversation keeps its own options after that.

const NAME = "headrace-settings";
// The page folds these fields.
export const ADVANCED = ["top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
const NUMBERS = ["temperature", ...ADVANCED];
const CHOICES = ["model", "system", "tools", ...NUMBERS];

// All values are strings, each from a field of the form.
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

// Returns what is wrong with the typed tools, or "".
export function faultOf({ tools }) {
  try {
    return !tools || Array.isArray(JSON.parse(tools)) ? "" : "Tools must be a JSON array.";
  } catch {
    return "Tools must be a JSON array.";
  }
}

// Returns the fields of a request that differ from the model's defaults.
export function sampling(chosen) {
  const fields = {};
  for (const name of NUMBERS) if (chosen[name]) fields[name] = Number(chosen[name]);
  if (chosen.tools && !faultOf(chosen)) fields.tools = JSON.parse(chosen.tools);
  if (chosen.model) fields.model = chosen.model;
  return fields;
}
