// What the person chose, in localStorage: the key, the system prompt, how to sample.

const NAME = "headrace-settings";
export const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];

export function settings() {
  try {
    return { key: "", system: "", tools: "", ...JSON.parse(localStorage.getItem(NAME) ?? "{}") };
  } catch {
    return { key: "", system: "", tools: "" };
  }
}

export function saveSettings(changed) {
  localStorage.setItem(NAME, JSON.stringify({ ...settings(), ...changed }));
}

// The fields of a request that differ from the model's own.
export function sampling() {
  const chosen = settings();
  const fields = {};
  for (const name of NUMBERS) if (chosen[name] !== "" && chosen[name] != null) fields[name] = Number(chosen[name]);
  if (chosen.tools) fields.tools = JSON.parse(chosen.tools);
  return fields;
}
