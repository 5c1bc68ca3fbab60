// Lines over time (uPlot) and sparklines (a small canvas).
//
//   <${Chart} label="Time to first token" unit="seconds" t=${t} span=${300}
//     series=${[{ name: "ttft_p50", label: "p50", values }, { name: "ttft_p95", label: "p95", values }]} />
//
// `values` has one entry per entry of `t` (unix seconds); null is a gap. Lines differ by dashes as well as by colour.

import { clock, dateTime, UNITS } from "./format.js";
import { html, useEffect, useLayoutEffect, useRef } from "./html.js";
import { bridged, isolated, lastKnown, pointsOfMinute, yRange, yTicks } from "./scale.js";
import { onThemeChange } from "./theme.js";

const uPlot = window.uPlot; // vendor/uplot.js, a classic script
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [4, 2, 1, 2], [14, 4]];
const MOST_LINES = DASHES.length;
const TIME_STEPS_S = [60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 1209600]; // between two times of an axis
const UPDATES_UNSEEN = 5; // of so many, a chart out of view draws one

export function Chart({ label, unit = "count", t, series, span, height = 150, max = null, testid }) {
  const box = useRef(null);
  const plot = useRef(null);
  const names = series.map((line) => line.name).join(" ");
  const latest = useRef(null);
  const isSeen = useRef(true); // charts out of view are drawn when they come back, and now and then
  const updates = useRef(0);
  latest.current = { t, series, span };

  useLayoutEffect(() => {
    const make = () => {
      plot.current?.destroy();
      plot.current = new uPlot(options(box.current, { unit, series, height, max, latest }), data(latest.current), box.current);
    };
    make();
    const sizes = new ResizeObserver(() => plot.current?.setSize({ width: width(box.current), height }));
    sizes.observe(box.current);
    const view = new IntersectionObserver((entries) => {
      isSeen.current = entries.at(-1).isIntersecting;
      if (isSeen.current) plot.current?.setData(data(latest.current));
    });
    view.observe(box.current);
    const forget = onThemeChange(make);
    return () => {
      forget();
      sizes.disconnect();
      view.disconnect();
      plot.current?.destroy();
      plot.current = null;
    };
  }, [names, unit, height, max]);

  useEffect(() => {
    const isOther = Math.abs(t.length - (plot.current?.data[0].length ?? 0)) > UPDATES_UNSEEN; // history came
    updates.current += 1;
    if (isSeen.current || isOther || updates.current % UPDATES_UNSEEN === 0) plot.current?.setData(data(latest.current));
  }, [t, span]);

  const now = series.map((line) => UNITS[unit].show(lastKnown(line.values, pointsOfMinute(t))));
  const spoken = series.map((line, i) => `${line.label} ${now[i]}`).join(", ");
  return html`
    <figure class="chart" data-testid=${testid}>
      <div class="plot" ref=${box} role="img" aria-label=${`${label}, now: ${spoken}`}
        style=${{ height: `${height}px` }}></div>
      ${series.length > 1 && html`<${Legend} series=${series} now=${now} />`}
    </figure>`;
}

function Legend({ series, now }) {
  return html`
    <ul class="legend" aria-hidden="true">
      ${series.map((line, i) => html`
        <li key=${line.name}>
          <svg class=${`line line-${i + 1}`} viewBox="0 0 24 6" width="24" height="6" focusable="false">
            <line x1="0" y1="3" x2="24" y2="3" stroke-dasharray=${DASHES[i % MOST_LINES].join(" ")} />
          </svg>
          <span>${line.label}</span> <b class="number">${now[i]}</b>
        </li>`)}
    </ul>`;
}

const width = (box) => Math.max(80, Math.floor(box.clientWidth));
const data = ({ t, series }) => [t, ...series.map((line) => line.values)];

function visible({ t, span }) {
  const end = t.length ? t[t.length - 1] : Date.now() / 1000;
  return { min: end - (span ?? (t.length ? end - t[0] : 60)), max: end };
}

function options(box, { unit, series, height, max, latest }) {
  const style = getComputedStyle(box);
  const colour = (name) => style.getPropertyValue(name).trim();
  const font = `11px ${style.fontFamily}`;
  const axis = { stroke: colour("--text-soft"), font, ticks: { show: false }, grid: { stroke: colour("--grid"), width: 1 } };
  return {
    width: width(box), height,
    legend: { show: false },
    cursor: { drag: { x: false, y: false }, y: false, points: { size: 6 } },
    padding: [8, 18, 0, 0], // room for half a label of time on the right
    scales: { x: { time: true, range: () => Object.values(visible(latest.current)) }, y: { range: (_, low, high) => yRange(low, high, max) } },
    axes: [
      { ...axis, size: 26, space: 48, incrs: TIME_STEPS_S, grid: { show: false }, values: (_, ticks) => ticks.map((tick) => tickTime(tick, latest.current.span)) },
      { ...axis, size: 58, space: 32, splits: (_, __, low, high) => yTicks(low, high, unit), values: (_, ticks) => ticks.map(UNITS[unit].tick) },
    ],
    series: [{}, ...series.map((line, i) => {
      const stroke = colour(`--line-${(i % MOST_LINES) + 1}`);
      const points = { show: true, size: 4, width: 0, fill: stroke, filter: alone };
      return { label: line.label, width: 1.5, dash: DASHES[i % MOST_LINES], stroke, points, gaps: longGaps };
    })],
    plugins: [tooltip(unit, latest)],
  };
}

function tickTime(time, span) {
  if (span > 2 * 86400) return dateTime(time).slice(5, 10);
  return time % 60 ? clock(time) : clock(time).slice(0, 5);
}

// A value between two gaps would be a line of no length: it is drawn as a dot.
const alone = (plot, index) => isolated(plot.data[index], plot.data[0]);

// Of the gaps that uPlot found (in pixels), those that are long enough to mean something.
function longGaps(plot, _series, _from, _to, gaps) {
  const within = bridged(plot.data[0]);
  return gaps.filter(([from, to]) => plot.posToVal(to, "x", true) - plot.posToVal(from, "x", true) > within);
}

// Time and all values beside the cursor. It floats over the plot, so that nothing moves.
function tooltip(unit, latest) {
  const box = document.createElement("div");
  box.className = "tooltip";
  box.hidden = true;
  const { show } = UNITS[unit];
  return {
    hooks: {
      init: (plot) => plot.over.append(box),
      setCursor: (plot) => {
        const at = plot.cursor.idx;
        const { t, series, span } = latest.current;
        box.hidden = at === null || at === undefined || t[at] === undefined;
        if (box.hidden) return;
        const rows = series.map((line) => textElement("div", `${line.label}  ${show(line.values[at])}`));
        box.replaceChildren(textElement("b", span > 86400 ? dateTime(t[at]) : clock(t[at])), ...rows);
        const isRight = plot.cursor.left > plot.over.clientWidth / 2;
        box.style.left = isRight ? "auto" : `${plot.cursor.left + 12}px`;
        box.style.right = isRight ? `${plot.over.clientWidth - plot.cursor.left + 12}px` : "auto";
      },
    },
  };
}

function textElement(tag, text) {
  const element = document.createElement(tag);
  element.textContent = text;
  return element;
}

// A line without axes, for a cell of a table. `label` says in words what it shows.
export function Sparkline({ values, label, max = null, width: wide = 72, height = 18 }) {
  const canvas = useRef(null);
  useEffect(() => drawSparkline(canvas.current, values, max, wide, height), [values, max]);
  return html`<canvas class="sparkline" ref=${canvas} role="img" aria-label=${label} width=${wide} height=${height}></canvas>`;
}

function drawSparkline(canvas, values, max, wide, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = wide * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const style = getComputedStyle(canvas);
  pen.fillStyle = style.getPropertyValue("--border").trim();
  pen.fillRect(0, height - 1, wide, 1);
  pen.strokeStyle = style.getPropertyValue("--line-1").trim();
  pen.lineWidth = 1.25;
  const top = max ?? Math.max(1e-9, ...values.filter((value) => value !== null));
  const step = wide / Math.max(1, values.length - 1);
  let isDrawing = false;
  pen.beginPath();
  values.forEach((value, i) => {
    if (value === null) isDrawing = false;
    else {
      const y = height - 2 - (value / top) * (height - 4);
      if (isDrawing) pen.lineTo(i * step, y);
      else pen.moveTo(i * step, y);
      isDrawing = true;
    }
  });
  pen.stroke();
}
