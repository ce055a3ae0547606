// Draws charts on canvases, in the colours of the page.

// The colours of the page when the last chart was begun. Each access makes the browser compute all styles.
const colors = {};
const color = (name) => colors[name];

// A custom property would be returned as it is written, so a property that uses it is read.
function lookAt(name) {
  document.documentElement.style.caretColor = `var(--${name})`;
  return getComputedStyle(document.documentElement).caretColor;
}

function prepare(canvas) {
  for (const name of ["text", "soft", "line", "main", "prompt", "bad"]) colors[name] = lookAt(name);
  const scale = devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.font = "12px system-ui, sans-serif";
  return [pen, width, height];
}

function text(pen, words, x, y, align = "left") {
  pen.fillStyle = color("soft");
  pen.textAlign = align;
  pen.fillText(words, x, y);
}

function line(pen, x1, y1, x2, y2, name) {
  pen.strokeStyle = color(name);
  pen.lineWidth = 1.5;
  pen.beginPath();
  pen.moveTo(x1, y1);
  pen.lineTo(x2, y2);
  pen.stroke();
}

// Returns the end of a scale: the longest value. If a few values are far beyond all others, the scale ends below
// them, and they are cut.
function endOf(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const high = sorted[Math.floor(0.98 * (sorted.length - 1))] ?? 0;
  const longest = sorted.at(-1) ?? 0;
  return Math.max(10, longest > 2 * high && sorted.length > 1 ? 1.3 * high : 1.1 * longest);
}

// Returns the end of the scale of steps. Steps with prompts are longer than others, so each kind counts by itself,
// unless it has hardly any steps.
function endOfSteps(steps) {
  const kinds = [true, false].map((isPrompt) => steps.filter((step) => isPrompt === step.prompt_tokens > 0));
  const common = kinds.filter(({ length }) => length > 3);
  return Math.max(...(common.length ? common : [steps]).map((some) => endOf(some.map((step) => step.actual_ms))));
}

// Marks a value beyond the scale, at its upper end.
function cut(pen, x, top, wide) {
  pen.fillStyle = color("bad");
  pen.beginPath();
  pen.moveTo(x + wide / 2, top - 9);
  pen.lineTo(x + wide / 2 - 5, top - 1);
  pen.lineTo(x + wide / 2 + 5, top - 1);
  pen.fill();
}

export function drawSteps(canvas, steps, target) {
  const [pen, width, height] = prepare(canvas);
  const left = 50;
  const base = height * 0.7;
  const top = 20;
  const most = endOfSteps(steps);
  const mostTokens = Math.max(1, ...steps.map((step) => step.prompt_tokens));
  const wide = (width - left) / Math.max(steps.length, 60);
  const y = (ms) => Math.max(top, base - (ms / most) * (base - top));
  steps.forEach((step, k) => {
    const x = left + k * wide;
    const bar = Math.max(wide * 0.8, 1);
    pen.fillStyle = color(step.prompt_tokens ? "prompt" : "main");
    pen.fillRect(x, y(step.actual_ms), bar, base - y(step.actual_ms));
    pen.fillStyle = color("prompt");
    pen.fillRect(x, base + 2, bar, (step.prompt_tokens / mostTokens) * (height - base - 6));
    if (step.actual_ms > most) cut(pen, x, top, bar);
    pen.fillStyle = color("text");
    if (step.predicted_ms && step.predicted_ms <= most) pen.fillRect(x + bar / 2 - 1.5, y(step.predicted_ms) - 1.5, 3, 3);
  });
  line(pen, left, base, width, base, "line");
  const isNear = target != null && target <= most;
  if (isNear) line(pen, left, y(target), width, y(target), "bad");
  if (isNear) text(pen, `${target} ms`, left - 6, y(target) + 4, "right");
  if (target != null && !isNear) text(pen, `stall target ${target} ms ↑`, width, 9, "right");
  if (!isNear || y(target) > top + 20) text(pen, `${most.toFixed(0)} ms`, left - 6, top + 4, "right");
  text(pen, "0", left - 6, base + 4, "right");
  if (mostTokens > 1) text(pen, `${mostTokens} tok`, left - 6, height - 4, "right");
}

const MIN_SPAN_S = 60;
const MIN_BAR = 4; // pixels

const ago = (seconds) => (seconds < 120 ? `${seconds} s ago` : seconds < 3570 ? `${Math.round(seconds / 60)} min ago` : "1 h ago");

// Draws bars over the last hour, from points that may have gaps in between. The axis starts at the oldest point, so
// that the few points of a new server fill the width.
//
// With one name, a bar shows that value from zero. With two names, a bar goes from one value to the other on a
// logarithmic scale, since waits differ by so much. A bar that stands for several points shows their highest values.
export function drawHour(canvas, { every_s: every, points }, [name, upTo], most) {
  const [pen, width, height] = prepare(canvas);
  const base = height - 17;
  const top = 4;
  const span = Math.max(MIN_SPAN_S, ...points.map((point) => point.ago_s));
  line(pen, 0, base, width, base, "line");
  text(pen, ago(span), 0, height - 4);
  text(pen, "now", width, height - 4, "right");
  const num = Math.max(1, Math.min(Math.ceil(span / every), Math.floor(width / MIN_BAR)));
  const bars = new Map();
  for (const point of points.filter((one) => one[name] !== null)) {
    const k = Math.min(num - 1, Math.floor(((span - point.ago_s) * num) / span));
    const highest = (which) => Math.max(bars.get(k)?.[which] ?? 0, point[which]);
    bars.set(k, { [name]: highest(name), ...(upTo && { [upTo]: highest(upTo) }) });
  }
  const share = (value) => (upTo ? Math.log(Math.max(value, 1)) / Math.log(Math.max(most, 10)) : value / (most || 1));
  const y = (value) => base - share(value) * (base - top);
  const wide = width / num;
  for (const [k, bar] of bars) {
    const at = k * wide;
    pen.fillStyle = color(upTo ? "line" : "main");
    pen.fillRect(at, y(bar[upTo ?? name]), wide - 1, (upTo ? y(bar[name]) : base) - y(bar[upTo ?? name]));
    if (!upTo) continue;
    pen.fillStyle = color("main");
    pen.fillRect(at, y(bar[name]) - 1, wide - 1, 2);
  }
}

export function drawGaps(canvas, gaps, target) {
  const [pen, width, height] = prepare(canvas);
  const num = 40;
  const base = height - 22;
  const most = endOf(gaps);
  const longer = gaps.filter((gap) => gap > most).length;
  const counts = new Array(num).fill(0);
  for (const gap of gaps) if (gap <= most) counts[Math.min(num - 1, Math.floor((gap / most) * num))]++;
  const highest = Math.max(1, longer, ...counts);
  // The last bar counts the gaps that are cut.
  const wide = width / (num + 1);
  [...counts, longer].forEach((count, k) => {
    const high = count && Math.max(2, (count / highest) * (base - 16));
    pen.fillStyle = color(k === num ? "bad" : "main");
    pen.fillRect(k * wide + 1, base - high, wide - 2, high);
  });
  line(pen, 0, base, width, base, "line");
  text(pen, "0 ms", 0, height - 6);
  const isNear = target != null && target <= most;
  const x = isNear ? (target / most) * num * wide : 0;
  const end = longer ? `${longer} longer than ${most.toFixed(0)} ms` : `${most.toFixed(0)} ms`;
  // Leave room for the label of the target.
  if (width - x > 150) text(pen, end, width, height - 6, "right");
  if (target != null && !isNear) text(pen, `stall target ${target} ms →`, width, 9, "right");
  if (!isNear) return;
  line(pen, x, 8, x, base, "bad");
  text(pen, `${target} ms`, x, height - 6, "center");
}
