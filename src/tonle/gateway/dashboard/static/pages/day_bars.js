// A bar per day. The table below it has the same numbers; the picture as a whole has a text for screen readers.

import { html, useLayoutEffect, useRef, useState } from "../html.js";
import { labelled, yTicks } from "../scale.js";

const HEIGHT = 160;
const LEFT = 72; // room for the numbers of the scale
const BOTTOM = 20; // room for the days
const LABEL_PX = 70; // from one day's label to the next, at least

// The width of an element, also after the window changed its own.
function useWidth(element) {
  const [width, setWidth] = useState(600);
  useLayoutEffect(() => {
    const sizes = new ResizeObserver(() => setWidth(Math.max(240, element.current.clientWidth)));
    sizes.observe(element.current);
    return () => sizes.disconnect();
  }, []);
  return width;
}

export function DayBars({ days, measure, show }) {
  const box = useRef(null);
  const width = useWidth(box);
  const values = days.map((day) => day[measure.id] ?? 0);
  const top = Math.max(...values, 0);
  return html`<div ref=${box} class="day-bars-box">${top > 0
    ? html`<${Bars} days=${days} values=${values} top=${top} width=${width} measure=${measure} show=${show} />`
    : html`<p class="hint">Nothing in this range.</p>`}</div>`;
}

function Bars({ days, values, top, width, measure, show }) {
  const step = (width - LEFT) / days.length;
  const gap = Math.min(3, step * 0.2);
  const height = (value) => (value / top) * (HEIGHT - BOTTOM - 10);
  const best = days[values.indexOf(top)];
  const label = `${measure.name} per day from ${days[0].day} to ${days.at(-1).day}; most on ${best.day}: ${show(top)}`;
  const hasLabel = labelled(days.length, step, LABEL_PX);
  return html`<svg class="day-bars" viewBox=${`0 0 ${width} ${HEIGHT}`} height=${HEIGHT} role="img" aria-label=${label} data-testid="usage-chart">
    ${yTicks(0, top, measure.unit).map((tick) => {
      const y = HEIGHT - BOTTOM - height(tick);
      return html`<g key=${tick}><line class="grid" x1=${LEFT} x2=${width} y1=${y} y2=${y} />
        <text x=${LEFT - 6} y=${y + 4} text-anchor="end">${show(tick)}</text></g>`;
    })}
    ${days.map((day, i) => html`<g key=${day.day} class="day">
      <rect class="day-hit" x=${LEFT + i * step} y="0" width=${step} height=${HEIGHT - BOTTOM} />
      <rect class="bar" x=${LEFT + i * step + gap / 2} y=${HEIGHT - BOTTOM - height(values[i])} width=${step - gap} height=${height(values[i])} />
      <title>${day.day}: ${show(values[i])}</title>
      ${hasLabel[i] && html`
        <text x=${LEFT + (i + 0.5) * step} y=${HEIGHT - 4} text-anchor="middle">${day.day.slice(5)}</text>`}
    </g>`)}
  </svg>`;
}
