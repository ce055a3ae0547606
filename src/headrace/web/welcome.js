// Shows an empty conversation: the model, what it can do, and a few first prompts.

import { button, el } from "./dom.js";
import { icon } from "./icons.js";

const STARTERS = [
  { title: "Explain", prompt: "Explain how a water mill works, to a child of ten." },
  { title: "Write", prompt: "Write a short letter that thanks a neighbour for help." },
  { title: "Plan", prompt: "Plan three days in Lisbon with little walking." },
];
const PICTURE = { title: "Look", prompt: "Look at a picture and describe it" };

// `model` is {id, about, starters, context, sees, calls, thinks}, or null while it is unknown. Calls `begin` with
// a starter, `look` for the starter that needs a picture, and `get` to download a model.
export function welcome(model, { begin, look, get }) {
  if (!model) return el("div", { class: "welcome" });
  const can = [model.context && `${model.context.toLocaleString("en")} tokens of context`, model.sees && "sees images", model.thinks && "can think first", model.calls && "can call tools"].filter(Boolean);
  const general = model.sees ? [PICTURE, ...STARTERS.slice(1)] : STARTERS;
  const isChat = model.starters?.length !== 0;
  const starters = (model.starters ?? general).map((starter) => {
    const act = () => (starter === PICTURE ? look() : begin(starter));
    return el("button", { type: "button", on: { click: act } }, el("strong", {}, starter.title), el("span", {}, starter.prompt));
  });
  const about = model.about && [el("p", { class: "about" }, model.about), button("Get another model", get, { class: "primary" })];
  return el("div", { class: "welcome" }, ...[
    el("img", { src: "web/icon.svg", alt: "" }),
    el("h2", {}, model.id),
    el("ul", { class: "can", "aria-label": "What this model can do" }, ...can.map((one) => el("li", {}, one))),
    ...(about ?? []),
    isChat && el("div", { class: "starters" }, ...starters),
    isChat && el("p", { class: "soft" }, "You can close this page at any time: the answer continues, and is here when you return."),
  ].filter(Boolean));
}
