// A bar per day. The table below it has the same numbers; the picture as a whole has a text for screen readers.

import { html } from "../html.js";

const WIDTH = 900;
const HEIGHT = 160;
const LEFT = 64; // room for the numbers of the scale
const BOTTOM = 20; // room for the days
const MOST_LABELS = 8;

export function DayBars({ days, measure, show }) {
  const values = days.map((day) => day[measure.id] ?? 0);
  const top = Math.max(...values, 0);
  if (!(top > 0)) return html`<p class="hint">Nothing in this range.</p>`;
  const step = (WIDTH - LEFT) / days.length;
  const gap = Math.min(3, step * 0.2);
  const height = (value) => (value / top) * (HEIGHT - BOTTOM - 10);
  const best = days[values.indexOf(top)];
  const label = `${measure.name} per day from ${days[0].day} to ${days.at(-1).day}; most on ${best.day}: ${show(top)}`;
  const every = Math.ceil(days.length / MOST_LABELS);
  return html`<div class="day-bars-box"><svg class="day-bars" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${label} data-testid="usage-chart">
    ${[0, 0.5, 1].map((share) => {
      const y = HEIGHT - BOTTOM - height(share * top);
      return html`<g key=${share}><line class="grid" x1=${LEFT} x2=${WIDTH} y1=${y} y2=${y} />
        <text x=${LEFT - 6} y=${y + 4} text-anchor="end">${show(share * top)}</text></g>`;
    })}
    ${days.map((day, i) => html`<g key=${day.day} class="day">
      <rect class="day-hit" x=${LEFT + i * step} y="0" width=${step} height=${HEIGHT - BOTTOM} />
      <rect class="bar" x=${LEFT + i * step + gap / 2} y=${HEIGHT - BOTTOM - height(values[i])} width=${step - gap} height=${height(values[i])} />
      <title>${day.day}: ${show(values[i])}</title>
      ${i % every === 0 && html`<text x=${LEFT + (i + 0.5) * step} y=${HEIGHT - 4} text-anchor="middle">${day.day.slice(5)}</text>`}
    </g>`)}
  </svg></div>`;
}
