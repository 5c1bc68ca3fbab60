// Where one request's time went: a table of spans, each with its bar on one common scale from 0 to the total.
//
// The spans tile the total. Parts of a span (stalled, preempted) are rows below it, and hatched inside its bar: they say how much
// of it, not when.

import { html } from "../html.js";
import { seconds } from "../format.js";

const MARKED = new Set(["stalled", "preempted"]);
const slug = (name) => name.replaceAll(" ", "-");

// A bar's place: percentages of the total, cut to 0..100.
export function place(span, total) {
  if (!(total > 0)) return { left: 0, width: 0 };
  const left = Math.min(100, Math.max(0, (span.start_s / total) * 100));
  const width = Math.min(100 - left, Math.max(0, (span.seconds / total) * 100));
  return { left, width };
}

const style = ({ left, width }) => ({ left: `${left}%`, width: `${width}%` });

function Bar({ span, total, isPart }) {
  const kind = isPart ? slug(span.name) : `span-${slug(span.name)}`;
  const marked = isPart ? [] : (span.children ?? []).filter((part) => MARKED.has(part.name));
  return html`<div class="waterfall-track" aria-hidden="true">
    <div class=${`waterfall-bar ${kind}`} style=${style(place(span, total))}></div>
    ${marked.map((part) => html`
      <div key=${`${part.name}${part.start_s}`} class=${`waterfall-bar ${slug(part.name)}`} style=${style(place(part, total))}></div>`)}
  </div>`;
}

function Row({ span, total, isPart = false }) {
  const note = span.detail || (isPart ? "of the time above, in all" : "");
  return html`<tr class=${isPart ? "is-part" : ""} data-testid=${isPart ? "span-part" : "span"} data-span=${span.name}
      data-start=${span.start_s} data-seconds=${span.seconds}>
    <th scope="row">${span.name}</th>
    <td class="waterfall-cell"><${Bar} span=${span} total=${total} isPart=${isPart} />
      ${note && html`<div class="hint">${note}</div>`}</td>
    <td class="right wide">${seconds(span.start_s)}</td>
    <td class="right">${seconds(span.seconds)}</td>
  </tr>`;
}

export function Waterfall({ explanation }) {
  const { spans, total_s: total } = explanation;
  if (!spans?.length) return html`<p class="hint">No times are known for this request.</p>`;
  return html`<div class="table-box" tabindex="0" role="region" aria-label="Parts of the time">
    <table class="waterfall" data-testid="waterfall" data-total=${total}>
      <caption class="unseen">The parts of the request's time, in order; they add up to ${seconds(total)}.</caption>
      <thead>
        <tr>
          <th scope="col">Part</th>
          <th scope="col"><span class="unseen">On a scale from 0 to ${seconds(total)}</span>
            <div class="waterfall-scale" aria-hidden="true"><span>0</span><span>${seconds(total / 2)}</span><span>${seconds(total)}</span></div></th>
          <th scope="col" class="right wide">Start</th>
          <th scope="col" class="right">Duration</th>
        </tr>
      </thead>
      <tbody>
        ${spans.map((span, i) => [
          html`<${Row} key=${i} span=${span} total=${total} />`,
          ...(span.children ?? []).map((part, j) => html`<${Row} key=${`${i}.${j}`} span=${part} total=${total} isPart=${true} />`),
        ])}
      </tbody>
      <tfoot>
        <tr><th scope="row">Total</th><td></td><td class="wide"></td><td class="right" data-testid="waterfall-total">${seconds(total)}</td></tr>
      </tfoot>
    </table>
  </div>`;
}
