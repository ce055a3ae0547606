// Draws on canvases, in the colours of the page.

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);

function prepare(canvas) {
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

export function drawSteps(canvas, steps, target) {
  const [pen, width, height] = prepare(canvas);
  const left = 50;
  const base = height * 0.7;
  const top = 16;
  const most = 1.1 * Math.max(target ?? 0, 10, ...steps.map((step) => Math.max(step.actual_ms, step.predicted_ms)));
  const mostTokens = Math.max(1, ...steps.map((step) => step.prompt_tokens));
  const wide = (width - left) / Math.max(steps.length, 60);
  const y = (ms) => base - (ms / most) * (base - top);
  steps.forEach((step, k) => {
    const x = left + k * wide;
    const bar = Math.max(wide * 0.8, 1);
    pen.fillStyle = color(step.prompt_tokens ? "prompt" : "main");
    pen.fillRect(x, y(step.actual_ms), bar, base - y(step.actual_ms));
    pen.fillStyle = color("prompt");
    pen.fillRect(x, base + 2, bar, (step.prompt_tokens / mostTokens) * (height - base - 6));
    pen.fillStyle = color("text");
    if (step.predicted_ms) pen.fillRect(x + bar / 2 - 1.5, y(step.predicted_ms) - 1.5, 3, 3);
  });
  line(pen, left, base, width, base, "line");
  if (target != null) line(pen, left, y(target), width, y(target), "bad");
  if (target != null) text(pen, `${target} ms`, left - 6, y(target) + 4, "right");
  text(pen, "0", left - 6, base + 4, "right");
  if (mostTokens > 1) text(pen, `${mostTokens} tok`, left - 6, height - 4, "right");
}

export function drawGaps(canvas, gaps, target) {
  const [pen, width, height] = prepare(canvas);
  const num = 40;
  const base = height - 22;
  const most = 1.15 * Math.max(target ?? 0, 20, gaps.at(-1) ?? 0);
  const counts = new Array(num).fill(0);
  for (const gap of gaps) counts[Math.min(num - 1, Math.floor((gap / most) * num))]++;
  const highest = Math.max(1, ...counts);
  const wide = width / num;
  pen.fillStyle = color("main");
  counts.forEach((count, k) => {
    const high = count && Math.max(2, (count / highest) * (base - 16));
    pen.fillRect(k * wide + 1, base - high, wide - 2, high);
  });
  line(pen, 0, base, width, base, "line");
  text(pen, "0 ms", 0, height - 6);
  const x = ((target ?? 0) / most) * width;
  if (width - x > 90) text(pen, `${most.toFixed(0)} ms`, width, height - 6, "right"); // beside the target's
  if (target == null) return;
  line(pen, x, 8, x, base, "bad");
  text(pen, `${target} ms`, x, height - 6, "center");
}
