// The page "Overview": how the server does, now and over a chosen time.

import { Chart } from "../charts.js";
import { bytes, count, money, percent, seconds, UNITS } from "../format.js";
import { newest, RangeChoice, rangeOf, recently, useSeries } from "../history.js";
import { html } from "../html.js";
import { useLive } from "../live.js";
import { Card, Message, PageHeading } from "../widgets.js";
import { Alerts, Errors, Firing, MissedPrefixes, SlaCard } from "./overview_lists.js";

export const title = "Overview";

export default function OverviewPage({ session, params }) {
  const range = rangeOf(params);
  const { event } = useLive();
  const series = useSeries(range);
  return html`
    <${PageHeading} title=${title}><${RangeChoice} page="overview" range=${range} /><//>
    ${series.error && html`<${Message} kind="bad">${series.error}<//>`}
    <${Firing} firing=${event?.firing} />
    <${SlaCard} sla=${event?.sla} />
    <div class="cards">
      <${Load} series=${series} />
      <${Latencies} series=${series} latest=${event?.percentiles} />
      <${Machine} series=${series} />
      <${Caches} series=${series} event=${event} />
      <${Cost} series=${series} session=${session} />
      <${Errors} errors=${event?.errors} />
      <${Alerts} alerts=${event?.alerts} />
    </div>
    <p class="hint">Figures beside the titles are means of the last 10 s, percentiles those of the last minute; figures below charts are of their newest point.
      ${session.has.price ? " Costs are in the currency of price_per_hour." : " Set price_per_hour to see what requests and tokens cost."}</p>`;
}

// A card with a chart of one or more lines: `lines` are [name, label].
function ChartCard({ title: name, value, lines, unit, max = null, series, testid, children }) {
  return html`
    <${Card} title=${name} value=${value} testid=${testid}>
      <${Chart} label=${name} unit=${unit} max=${max} t=${series.t} span=${series.span} series=${lines.map((line) => series.line(...line))} />
      ${children}
    <//>`;
}

function Load({ series }) {
  return html`
    <${ChartCard} title="Requests" value=${UNITS.per_s.show(recently("requests_per_s"))} unit="per_s" series=${series} testid="requests-per-s"
      lines=${[["requests_per_s", "ended"], ["failed_per_s", "failed"], ["refused_per_s", "refused"]]} />
    <${ChartCard} title="Output tokens" value=${UNITS.tokens_per_s.show(recently("output_tokens_per_s"))} unit="tokens_per_s" series=${series} testid="output-tokens"
      lines=${[["output_tokens_per_s", "output"]]} />
    <${ChartCard} title="Prompt tokens" value=${UNITS.tokens_per_s.show(recently("prompt_tokens_per_s"))} unit="tokens_per_s" series=${series} testid="prompt-tokens"
      lines=${[["prompt_tokens_per_s", "prompts"]]} />
    <${ChartCard} title="Running and waiting" unit="count" series=${series} testid="running"
      value=${`${count(newest("running"))} and ${count(newest("waiting"))}`} lines=${[["running", "running"], ["waiting", "waiting"]]} />`;
}

const LATENCIES = [
  ["ttft", "Time to first token"],
  ["itl", "Time between tokens"],
  ["e2e", "End-to-end latency"],
];

// Charts have a point for each second; the figures beside the titles are of the last minute, so that a few requests do not make them jump.
function Latencies({ series, latest }) {
  return LATENCIES.map(([name, words]) => html`
    <${ChartCard} key=${name} title=${words} value=${`p95 ${seconds(latest?.[`${name}_p95`] ?? null)}`} unit="seconds" series=${series} testid=${name}
      lines=${["p50", "p95", "p99"].map((percentile) => [`${name}_${percentile}`, percentile])} />`);
}

// What a server cannot tell (a GPU it does not have, the KV cache of servers behind it) has no card.
function Machine({ series }) {
  const isTold = (name) => series.isKnown(name) || newest(name) !== null;
  return html`
    ${isTold("kv_usage") && html`
      <${ChartCard} title="KV cache in use" value=${percent(newest("kv_usage"))} unit="percent" max=${1} series=${series} testid="kv-usage"
        lines=${[["kv_usage", "in use"]]} />`}
    ${isTold("gpu_utilization") && html`
      <${ChartCard} title="GPU use" value=${percent(newest("gpu_utilization"))} unit="percent" max=${1} series=${series} testid="gpu-use"
        lines=${[["gpu_utilization", "busy"]]} />`}
    ${isTold("gpu_memory_used") && html`
      <${ChartCard} title="GPU memory" value=${shareOf(newest("gpu_memory_used"), newest("gpu_memory_total"))} unit="bytes" series=${series}
        testid="gpu-memory" lines=${[["gpu_memory_used", "used"], ["gpu_memory_total", "total"]]} />`}
    ${isTold("acceptance") && html`
      <${ChartCard} title="Speculated tokens accepted" value=${percent(newest("acceptance"))} unit="percent" max=${1} series=${series}
        testid="acceptance" lines=${[["acceptance", "accepted"]]} />`}`;
}

const shareOf = (used, total) => (total ? `${bytes(used)}, ${percent(used / total)}` : bytes(used));

function Caches({ series, event }) {
  return html`
    <${ChartCard} title="Prefix cache hit rate" value=${percent(newest("prefix_hit_rate"))} unit="percent" max=${1} series=${series}
      testid="prefix-hit-rate" lines=${[["prefix_hit_rate", "prompt tokens found"]]}>
      <${MissedPrefixes} missed=${event?.prefix_missed} />
    <//>
    <${ChartCard} title="Response cache hit rate" value=${percent(newest("cache_hit_rate"))} unit="percent" max=${1} series=${series}
      testid="cache-hit-rate" lines=${[["cache_hit_rate", "answers found"]]}>
      ${series.t.length > 0 && !series.isKnown("cache_hit_rate") && html`<p class="hint">No request asked it in this time.</p>`}
    <//>`;
}

// Of different sizes, so each has a chart of its own.
function Cost({ series, session }) {
  if (!session.has.price) return null;
  return html`
    <${ChartCard} title="Cost per request" value=${money(newest("cost_per_request"))} unit="money" series=${series} testid="cost-per-request"
      lines=${[["cost_per_request", "per request"]]} />
    <${ChartCard} title="Cost per million tokens" value=${money(newest("cost_per_million_tokens"))} unit="money" series=${series}
      testid="cost-per-million" lines=${[["cost_per_million_tokens", "per million tokens"]]} />`;
}
