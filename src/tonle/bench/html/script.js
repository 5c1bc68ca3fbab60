"use strict";
// Draws timelines and answers the pointer and the keyboard. The page's tables and SVG charts stand without it.
// Texts of reports are only ever set as textContent, or drawn.
const DATA = JSON.parse(document.getElementById("data").textContent);
const find = (selector, root = document) => [...root.querySelectorAll(selector)];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const LEFT = 64, RIGHT = 6, BOTTOM = 22;

function number(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1000) return Math.round(value).toLocaleString("en-US");
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
}
const ms = (value) => (value === null || value === undefined ? "–" : number(value) + " ms");
function spans(box, texts) {
  box.replaceChildren(...texts.filter(Boolean).map((text) => {
    const [name, value] = text;
    const span = document.createElement("span"), strong = document.createElement("b");
    strong.textContent = value;
    span.append(name + " ", strong);
    return span;
  }));
}

// Distributions: which lines are shown, and their values at a percentage.
const isShown = (key) => {
  const [run, level] = key.split("/");
  return ["run" + run, "level" + level].every((name) => {
    const box = document.querySelector(`[data-shows="${name}"]`);
    return !box || box.checked;
  });
};
function showLines() {
  for (const line of find("[data-key]")) line.toggleAttribute("hidden", !isShown(line.dataset.key));
}
function readAt(svg, percent) {
  const figure = svg.closest("figure"), [, top, , height] = svg.dataset.box.split(" ").map(Number);
  const [left, , width] = svg.dataset.box.split(" ").map(Number);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line"), y = top + height * (1 - percent / 100);
  for (const [name, value] of [["x1", left], ["x2", left + width], ["y1", y], ["y2", y]]) line.setAttribute(name, value);
  svg.querySelector(".guide").replaceChildren(line);
  const at = DATA.percents.reduce((best, each, place) =>
    (Math.abs(each - percent) < Math.abs(DATA.percents[best] - percent) ? place : best), 0);
  const rows = DATA.lines[figure.dataset.metric].filter(([key]) => isShown(key));
  spans(figure.querySelector(".readout"), [["p" + DATA.percents[at], "ms"],
    ...rows.map(([, name, values]) => [name, number(values[at])])]);
  svg.dataset.percent = percent;
}
for (const svg of find("svg.cdf")) {
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), [, top, , height] = svg.dataset.box.split(" ").map(Number);
    const y = (event.clientY - box.top) / box.height * svg.viewBox.baseVal.height;
    readAt(svg, Math.round(Math.min(100, Math.max(0, 100 * (1 - (y - top) / height)))));
  });
  svg.addEventListener("focus", () => readAt(svg, Number(svg.dataset.percent || 50)));
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowUp: 1, ArrowRight: 1, ArrowDown: -1, ArrowLeft: -1, PageUp: 10, PageDown: -10 }[event.key];
    if (!step) return;
    event.preventDefault();
    readAt(svg, Math.min(100, Math.max(0, Number(svg.dataset.percent || 50) + step)));
  });
  svg.addEventListener("pointerleave", () => svg.querySelector(".guide").replaceChildren());
}
for (const box of find("[data-shows]")) box.addEventListener("change", showLines);
showLines();

// Throughput against latency: the percentile, and what a mark stands for.
for (const radio of find('[name="percent"]')) {
  radio.addEventListener("change", () => {
    for (const chart of find("svg.tradeoff")) chart.toggleAttribute("hidden", !chart.classList.contains(radio.value));
  });
}
for (const point of find(".point")) {
  const show = () => { point.closest("figure").querySelector(".readout").textContent = point.getAttribute("aria-label"); };
  for (const name of ["focus", "pointerenter", "click"]) point.addEventListener(name, show);
}

// Timelines, on canvases: a level may have thousands of requests.
const CHAT = DATA.kind === "chat"; // other kinds of requests have no tokens that come one by one
const picker = document.getElementById("level");
let chosen = -1; // the lane whose numbers are shown
const level = () => DATA.timelines[picker.value];

function canvas(name, height) {
  const element = document.getElementById(name), width = element.clientWidth, scale = window.devicePixelRatio || 1;
  element.style.height = height + "px";
  element.width = Math.round(width * scale);
  element.height = Math.round(height * scale);
  const pen = element.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  return { pen, width, height, x: (s) => LEFT + s / level().duration * (width - LEFT - RIGHT) };
}
function ticks(high, count) {
  const rough = high / count, unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * unit).find((each) => each >= rough * 0.999);
  return Array.from({ length: Math.floor(high / step + 1e-6) + 1 }, (_, place) => place * step);
}
const short = (value) => Number(value.toPrecision(3)).toLocaleString("en-US");
function timeAxis({ pen, width, height, x }, top) {
  pen.fillStyle = css("--quiet"); pen.strokeStyle = css("--rule"); pen.lineWidth = 1;
  for (const tick of ticks(level().duration, width < 600 ? 4 : 8)) {
    const left = Math.round(x(tick)) + 0.5;
    pen.beginPath(); pen.moveTo(left, top); pen.lineTo(left, height - BOTTOM); pen.stroke();
    pen.textAlign = left > width - 30 ? "right" : "center";
    pen.fillText(short(tick) + " s", Math.min(left, width - 2), height - 9);
  }
}
function valueAxis({ pen, width }, marks, y) {
  pen.textAlign = "right"; pen.lineWidth = 1;
  for (const [value, text] of marks) {
    const top = Math.round(y(value)) + 0.5;
    pen.strokeStyle = css("--rule"); pen.fillStyle = css("--quiet");
    pen.beginPath(); pen.moveTo(LEFT, top); pen.lineTo(width - RIGHT, top); pen.stroke();
    pen.fillText(text, LEFT - 6, top);
  }
}
function steps(name, layers) {
  const area = canvas(name, 120), { pen, height, x } = area, { duration } = level();
  const count = layers[0].values.length;
  const totals = layers[0].values.map((_, place) => layers.reduce((sum, layer) => sum + layer.values[place], 0));
  const high = Math.max(...totals, 1e-9) * 1.08, top = 8, y = (value) => height - BOTTOM - value / high * (height - BOTTOM - top);
  timeAxis(area, top);
  valueAxis(area, ticks(high, 3).map((tick) => [tick, short(tick)]), y);
  const base = new Array(count).fill(0);
  for (const { values, color, hatched } of layers) {
    const path = new Path2D();
    for (let place = 0; place < count; place++) {
      const left = x(place / count * duration), right = x((place + 1) / count * duration);
      path.rect(left, y(base[place] + values[place]), right - left + 0.4, y(base[place]) - y(base[place] + values[place]));
      base[place] += values[place];
    }
    pen.fillStyle = color;
    pen.globalAlpha = hatched ? 0.55 : 0.9; pen.fill(path); pen.globalAlpha = 1;
    if (hatched) {
      pen.save(); pen.clip(path); pen.strokeStyle = css("--page"); pen.lineWidth = 1.5;
      for (let at = -height; at < area.width; at += 6) { pen.beginPath(); pen.moveTo(at, height); pen.lineTo(at + height, 0); pen.stroke(); }
      pen.restore();
    }
  }
}
let scaleColors = [];
function readScale() {
  const stops = [0, 1, 2, 3, 4].map((place) => css("--heat" + place))
    .map((text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16)));
  scaleColors = Array.from({ length: 37 }, (_, place) => {
    const at = place / 36 * 4, low = Math.min(3, Math.floor(at)), share = at - low;
    return `rgb(${stops[low].map((value, part) => Math.round(value + (stops[low + 1][part] - value) * share)).join(",")})`;
  });
}
const COLUMNS = 120, LINES = 36;
function heat() {
  const area = canvas("heat", 210), { pen, height, x } = area, { heat: cells, gaps: [low, high], duration } = level(), top = 6;
  const y = (share) => height - BOTTOM - share * (height - BOTTOM - top);
  timeAxis(area, top);
  const marks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const factor of high / low > 200 ? [1] : [1, 2, 5]) {
      const value = factor * 10 ** power;
      if (value >= low && value <= high) marks.push([Math.log(value / low) / Math.log(high / low), short(value) + " ms"]);
    }
  }
  valueAxis(area, marks, y);
  let most = 1;
  for (let at = 2; at < cells.length; at += 3) most = Math.max(most, cells[at]);
  for (let at = 0; at < cells.length; at += 3) {
    const [column, line, count] = cells.slice(at, at + 3), left = x(column / COLUMNS * duration);
    pen.fillStyle = scaleColors[Math.round(4 + 32 * Math.log1p(count) / Math.log1p(most))];
    pen.fillRect(left, y((line + 1) / LINES), x((column + 1) / COLUMNS * duration) - left + 0.5, y(line / LINES) - y((line + 1) / LINES) + 0.5);
  }
}
function laneHeight() { return Math.max(3, Math.min(14, 560 / level().lanes.length)); }
function lanes() {
  const { lanes: rows } = level(), tall = laneHeight(), area = canvas("lanes", rows.length * tall + BOTTOM + 6), { pen, width, height, x } = area;
  timeAxis(area, 4);
  const every = Math.ceil(22 / tall) * Math.max(1, Math.ceil(rows.length / 24 / Math.ceil(22 / tall)));
  const bar = Math.max(2, tall - (tall > 5 ? 2 : 1));
  rows.forEach((row, place) => {
    const [index, start, delay, ttft, e2el, , , , , , colors, , words] = row, top = 4 + place * tall;
    const first = start + (ttft ?? e2el ?? 0) / 1e3, end = start + (e2el ?? ttft ?? 0) / 1e3, left = x(start);
    if (place % every === 0) {
      pen.fillStyle = css("--quiet"); pen.textAlign = "right"; pen.fillText("#" + index, LEFT - 6, top + tall / 2);
    }
    pen.fillStyle = css("--wait"); pen.fillRect(left, top, Math.max(1, x(first) - left), bar);
    if (delay > 0 && x(start + delay / 1e3) - left >= 1) {
      pen.strokeStyle = css("--late"); pen.lineWidth = 1; pen.strokeRect(left + 0.5, top + 0.5, x(start + delay / 1e3) - left - 1, bar - 1);
    }
    const count = Math.max(1, colors.length), piece = (end - first) / count;
    for (let part = 0; part < count && end > first; part++) {
      pen.fillStyle = scaleColors[colors ? parseInt(colors[part], 36) : 0];
      const from = x(first + part * piece);
      pen.fillRect(from, top, Math.max(0.6, x(first + (part + 1) * piece) - from + 0.3), bar);
    }
    if (words.failure) {
      pen.strokeStyle = css("--bad"); pen.lineWidth = 2; const at = Math.max(x(end), left) + 5, size = Math.min(4, tall / 2), middle = top + bar / 2;
      pen.beginPath(); pen.moveTo(at - size, middle - size); pen.lineTo(at + size, middle + size);
      pen.moveTo(at - size, middle + size); pen.lineTo(at + size, middle - size); pen.stroke();
    }
    if (place === chosen) {
      pen.strokeStyle = css("--text"); pen.lineWidth = 1.5; pen.strokeRect(LEFT - 2, top - 1.5, width - LEFT - RIGHT + 4, bar + 3);
    }
  });
}
function details() {
  const box = document.getElementById("request"), row = level().lanes[chosen];
  if (!row) {
    const { lanes: { length }, requests } = level();
    box.textContent = length < requests ? `${length} of ${requests.toLocaleString("en-US")} requests are shown.` : `${requests} requests.`;
    return;
  }
  const [index, start, delay, ttft, e2el, prompt, cached, output, median, longest, , good, words] = row;
  if (!CHAT) {
    spans(box, [["Request", "#" + index], ["due at", number(start) + " s"], delay > 0.5 && ["left late by", ms(delay)],
      ttft !== null && ["first audio", ms(ttft)], ["E2EL", ms(e2el)], prompt !== null && ["tokens", String(prompt)],
      good !== null && ["SLO", good ? "✓ kept" : "✗ missed"], ...Object.entries(words)]);
    return;
  }
  spans(box, [["Request", "#" + index], ["due at", number(start) + " s"], delay > 0.5 && ["left late by", ms(delay)], ["TTFT", ms(ttft)],
    ["E2EL", ms(e2el)], ["decoding", ttft !== null && e2el !== null ? ms(e2el - ttft) : "–"], ["ITL p50", ms(median)], ["longest", ms(longest)],
    ["prompt", `${prompt ?? "–"} tokens${cached ? ` (${cached} cached)` : ""}`], ["output", output + " tokens"],
    good !== null && ["SLO", good ? "✓ kept" : "✗ missed"], ...Object.entries(words)]);
}
function keys() {
  const box = document.getElementById("keys"), [low, high] = level().gaps, bar = document.createElement("canvas");
  const entry = (mark, text) => { const span = document.createElement("span"); span.append(mark, text); return span; };
  const patch = (name) => { const mark = document.createElement("i"); mark.className = name; return mark; };
  bar.width = 120; bar.height = 10;
  const pen = bar.getContext("2d");
  for (let at = 0; at < 36; at++) { pen.fillStyle = scaleColors[at]; pen.fillRect(at * 120 / 36, 0, 4, 10); }
  const gradient = document.createElement("span");
  gradient.append(`decoding, longest gap ${short(low)} ms`, bar, `${short(high)} ms`);
  const late = level().lanes.some((row) => row[2] > 0.5);
  const first = { chat: "waiting for the first token", tts: "waiting for the first audio" }[DATA.kind] || "waiting for the answer";
  box.replaceChildren(...[late && entry(patch("late"), "not sent yet"), entry(patch("wait"), first), CHAT && gradient,
    level().lanes.some((row) => row[12].failure) && entry("✗ ", "failed")].filter(Boolean));
}
function draw() {
  if (!picker) return;
  readScale();
  const { tokens, waiting, running } = level().steps;
  steps("tokens", [{ values: tokens, color: css("--c1") }]);
  steps("users", [{ values: running, color: css("--c3") }, { values: waiting, color: css("--c5"), hatched: true }]);
  document.getElementById("users-at").textContent = CHAT ? "solid: getting tokens, striped: waiting for the first" : "";
  if (CHAT) heat();
  lanes(); keys(); details();
}
function choose(place) {
  const next = Math.min(level().lanes.length - 1, Math.max(0, place));
  if (next === chosen) return;
  chosen = next; lanes(); details();
}
if (picker) {
  const bars = document.getElementById("lanes"), map = document.getElementById("heat");
  const under = (event) => Math.floor((event.clientY - bars.getBoundingClientRect().top - 4) / laneHeight());
  picker.addEventListener("change", () => { chosen = -1; draw(); });
  for (const name of ["pointermove", "pointerdown"]) bars.addEventListener(name, (event) => choose(under(event)));
  bars.addEventListener("focus", () => { if (chosen < 0) choose(0); });
  bars.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -1e9, End: 1e9 }[event.key];
    if (!step) return;
    event.preventDefault(); choose(chosen + step);
  });
  map?.addEventListener("pointermove", (event) => {
    const box = map.getBoundingClientRect(), { heat: cells, gaps: [low, high], duration } = level();
    const column = Math.floor((event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT) * COLUMNS);
    const line = Math.floor((box.height - BOTTOM - (event.clientY - box.top)) / (box.height - BOTTOM - 6) * LINES);
    let count = 0;
    for (let at = 0; at < cells.length; at += 3) if (cells[at] === column && cells[at + 1] === line) count = cells[at + 2];
    const size = (each) => short(low * (high / low) ** (each / LINES));
    document.getElementById("heat-at").textContent = column < 0 || column >= COLUMNS || line < 0 || line >= LINES ? "" :
      `${number(column / COLUMNS * duration)} s, ${size(line)} to ${size(line + 1)} ms: ${count} gap${count === 1 ? "" : "s"}`;
  });
  let pending = 0;
  new ResizeObserver(() => { cancelAnimationFrame(pending); pending = requestAnimationFrame(draw); }).observe(bars.parentElement);
  for (const query of ["(prefers-color-scheme: dark)", "print"]) window.matchMedia(query).addEventListener("change", draw);
  draw();
}
