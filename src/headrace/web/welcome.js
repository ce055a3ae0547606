// The empty conversation: the model, what it can do, and three ways to begin.

import { el } from "./dom.js";
import { icon } from "./icons.js";

const STARTERS = [
  ["Explain", "Explain how a water mill works, to a child of ten."],
  ["Write", "Write a short letter that thanks a neighbour for help."],
  ["Plan", "Plan three days in Lisbon with little walking."],
];
const PICTURE = ["Look", "Look at a picture and describe it"];

// `model`: {id, context, sees, calls, thinks} or null while it is not known; `begin` is called with
// the text of a starter, `look` for one that needs a picture.
export function welcome(model, begin, look) {
  if (!model) return el("div", { class: "welcome" });
  const can = [model.context && `${model.context.toLocaleString("en")} tokens of context`, model.sees && "sees images", model.thinks && "thinks first", model.calls && "calls tools"].filter(Boolean);
  const starters = (model.sees ? [PICTURE, ...STARTERS.slice(1)] : STARTERS).map((starter) => {
    const act = () => (starter === PICTURE ? look() : begin(starter[1]));
    return el("button", { type: "button", on: { click: act } }, el("strong", {}, starter[0]), el("span", {}, starter[1]));
  });
  return el("div", { class: "welcome" },
    el("img", { src: "web/icon.svg", alt: "" }),
    el("h2", {}, model.id),
    el("ul", { class: "can", "aria-label": "What this model can do" }, ...can.map((one) => el("li", {}, one))),
    el("div", { class: "starters" }, ...starters),
    el("p", { class: "soft" }, "You can close this page at any time: the answer continues, and is here when you return."));
}
