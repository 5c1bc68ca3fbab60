// Intervals drawn on one scale: a line from the lower to the upper end, a point at the value, and a line at zero.
//
// A picture beside the numbers, which say the same: it is hidden from screen readers.

import { html } from "../html.js";

const WIDTH = 220;
const HEIGHT = 22;
const EDGE = 8; // pixels left free on both sides

// From the values and ends of intervals to pixels. `from0`: the scale begins at zero (shares); otherwise it is as wide on both
// sides of zero (differences).
export function scale(entries, from0) {
  const numbers = entries.flatMap(({ value, interval }) => [value, ...(interval ?? [])]).filter((number) => Number.isFinite(number));
  const most = Math.max(1e-12, ...numbers.map(Math.abs));
  const least = from0 ? 0 : -most;
  return (number) => EDGE + ((number - least) / (most - least)) * (WIDTH - 2 * EDGE);
}

// kind: plain, good or bad.
export function Interval({ x, value, interval, kind = "plain" }) {
  const middle = HEIGHT / 2;
  return html`<svg class=${`interval ${kind}`} viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} width=${WIDTH} height=${HEIGHT} aria-hidden="true" focusable="false">
    <line class="zero" x1=${x(0)} x2=${x(0)} y1="0" y2=${HEIGHT} />
    ${interval && html`<line class="range" x1=${x(interval[0])} x2=${x(interval[1])} y1=${middle} y2=${middle} />
      ${interval.map((end, i) => html`<line key=${i} class="range" x1=${x(end)} x2=${x(end)} y1=${middle - 4} y2=${middle + 4} />`)}`}
    <circle cx=${x(value)} cy=${middle} r="4" />
  </svg>`;
}
