// The parts of the overview that are words and not charts: targets, errors, alerts, why prefixes were not found.

import { ago, count, number, percent, seconds } from "../format.js";
import { html, useState } from "../html.js";
import { live } from "../live.js";
import { Badge, Card } from "../widgets.js";
import { onTop } from "./firing.js";
import { isMissed, verdictOf } from "./targets.js";

const TARGETS = { e2e: "End-to-end latency, p95", ttft: "Time to first token, p95", itl: "Time between tokens, p95" };
const BURN_RATE = "How fast the 5 % of requests that may be slower are used up: at 1 exactly, above 1 too fast.";

export function SlaCard({ sla }) {
  const verdict = sla && verdictOf(sla);
  return html`
    <section class="card sla" aria-label="Targets" data-testid="sla">
      <p class="sla-sentence" role="status">
        ${verdict && html`<${Badge} kind=${verdict[0]}>${verdict[1]}<//>`} <span data-testid="sla-sentence">${sla ? sla.sentence : "Waiting for figures…"}</span>
      </p>
      ${sla?.targets?.length > 0 && html`
        <dl class="facts">${sla.targets.map((target) => html`<${Target} key=${target.name} target=${target} />`)}</dl>`}
    </section>`;
}

function Target({ target }) {
  return html`
    <div>
      <dt>${TARGETS[target.name] ?? target.name}</dt>
      <dd>
        <b class="number">${seconds(target.value_s)}</b> of ${seconds(target.target_s)}
        <span class="soft" title=${BURN_RATE}> · burn rate ${number(target.burn_rate)}</span>
        ${target.since && html`<span class="soft"> · ${isMissed(target)
          ? `missed for ${seconds(Math.round(live.now() - target.since))}` : "counts as met once it has held for a minute"}</span>`}
      </dd>
    </div>`;
}

export function Errors({ errors }) {
  const rows = Object.entries(errors ?? {}).sort(([, a], [, b]) => b - a);
  const total = rows.reduce((sum, [, times]) => sum + times, 0);
  return html`
    <${Card} title="Errors in the last minute" value=${count(total)} testid="errors">
      ${rows.length === 0 && html`<p class="soft">None.</p>`}
      <ul class="counts">
        ${rows.map(([code, times]) => html`
          <li key=${code}><a href=${`#/requests?text=${encodeURIComponent(code)}`}>${code}</a><b class="number">${count(times)}</b></li>`)}
      </ul>
    <//>`;
}

export function Firing({ firing }) {
  const { shown, numMore } = onTop(firing);
  return html`
    ${shown.map((alert) => html`
      <p class="message bad" role="alert" data-testid="firing" key=${`${alert.kind} ${alert.subject}`}>
        <b>Alert: </b>${alert.summary}${" "}<span class="soft">${ago(alert.time, live.now())}</span>
      </p>`)}
    ${numMore > 0 && html`<p class="message bad" data-testid="more-firing">And ${count(numMore)} more backends: <a href="#/backends">all backends</a></p>`}`;
}

const SHOWN_ALERTS = 5;

export function Alerts({ alerts }) {
  const [isLong, setLong] = useState(false);
  const newestFirst = [...(alerts ?? [])].sort((a, b) => b.time - a.time);
  const shown = isLong ? newestFirst : newestFirst.slice(0, SHOWN_ALERTS);
  return html`
    <${Card} title="Alerts" testid="alerts">
      ${shown.length === 0 && html`<p class="soft">None since the server started.</p>`}
      <ul class="alerts">
        ${shown.map((alert) => html`
          <li key=${`${alert.time} ${alert.kind} ${alert.subject} ${alert.state}`}>
            <${Badge} kind=${alert.state === "firing" ? "bad" : "good"}>${alert.state}<//>
            <span>${alert.summary}</span> <span class="soft">${ago(alert.time, live.now())}</span>
          </li>`)}
      </ul>
      ${newestFirst.length > SHOWN_ALERTS && html`
        <button type="button" aria-expanded=${isLong} onClick=${() => setLong(!isLong)}>${isLong ? "Show fewer" : `Show all ${newestFirst.length}`}</button>`}
    <//>`;
}

const REASONS = { new: "not computed before", evicted: "dropped to make room", tail: "end of the prompt: less than a block" };

export function MissedPrefixes({ missed }) {
  const total = Object.values(missed ?? {}).reduce((sum, tokens) => sum + tokens, 0);
  if (missed?.off > 0 && missed.off === total) return html`<p class="hint">The prefix cache is off (enable_prefix_caching).</p>`;
  return html`
    <h3>Prompt tokens not found in the last minute: <span class="number">${count(total)}</span></h3>
    <ul class="counts" data-testid="prefix-missed">
      ${Object.entries(REASONS).map(([why, words]) => html`
        <li key=${why}><span>${words}</span><b class="number">${percent(total ? (missed[why] ?? 0) / total : null)}</b></li>`)}
    </ul>`;
}
