// The page "Experiments": the arms of each, what was measured with its intervals, start and stop for admins.

import { post } from "../api.js";
import { count, number, percent, seconds } from "../format.js";
import { html } from "../html.js";
import { ActionButton, Badge, Message, PageHeading, useGet, whyReadOnly } from "../widgets.js";
import { Interval, scale } from "./interval_plot.js";

export const title = "Experiments";

const REFRESH_S = 10;

// How a measure is shown, and whether more of it is worse.
const MEASURES = {
  failure_rate: { name: "failure rate", show: percent, isCost: true },
  latency_ms: { name: "latency", show: milliseconds, isCost: true },
  ttft_ms: { name: "time to first token", show: milliseconds, isCost: true },
  output_tokens: { name: "output tokens", show: number, isCost: null },
};

function milliseconds(value) {
  return seconds(value === null || value === undefined ? null : value / 1000);
}

function signed(show, value) {
  return value > 0 ? `+${show(value)}` : show(value).replace("-", "−");
}

export default function ExperimentsPage({ session }) {
  const { data, error, isLoading, reload } = useGet(session.has.experiments ? "/admin/experiments" : null, {}, REFRESH_S);
  if (!session.has.experiments) return html`<${PageHeading} title=${title} /><${None} session=${session} />`;
  return html`
    <${PageHeading} title=${title} />
    ${error && html`<${Message} kind="bad">${error}<//>`}
    ${isLoading && !data && html`<p class="hint">Loading …</p>`}
    ${data && !data.experiments.length && html`<${None} session=${session} />`}
    ${data?.has_records === false && data.experiments.length > 0 && html`<${Message} kind="warning">Nothing is measured: the reports are made
      from the audit trail, and this gateway keeps none. Start it with --audit-dir DIR.<//>`}
    ${data?.experiments.map((experiment) => html`
      <${Experiment} key=${experiment.name} experiment=${experiment} session=${session} reload=${reload} />`)}`;
}

function None({ session }) {
  return html`<${Message} testid="no-experiments">${session.server.kind === "gateway"
    ? html`This gateway has no experiments. They are the setting <code>experiments</code>: a name, a model, and arms with weights.`
    : html`Experiments compare backends of a gateway; this server has one engine. Run <code>tonle gateway</code> in front of it.`}<//>`;
}

function Experiment({ experiment, session, reload }) {
  const { name, running } = experiment;
  const path = `/admin/experiments/${encodeURIComponent(name)}`;
  const change = async (word) => {
    await post(`${path}/${word}`);
    await reload();
  };
  const readOnly = whyReadOnly(session);
  return html`<section class="card experiment" data-testid="experiment" data-name=${name}>
    <div class="experiment-head">
      <h2>${name} <${Badge} kind=${running ? "good" : "info"}>${running ? "running" : "stopped"}<//></h2>
      ${running
        ? html`<${ActionButton} testid="stop-experiment" kind="danger" disabledReason=${readOnly} onRun=${() => change("stop")}
            confirm=${`Stop ${name}? All its requests are then served as if there were no experiment.`}>Stop<//>`
        : html`<${ActionButton} testid="start-experiment" disabledReason=${readOnly} onRun=${() => change("start")}
            confirm=${`Start ${name}? ${percent(experiment.share)} of users take part from now on.`}>Start<//>`}
    </div>
    <p>For <code>${experiment.model}</code>; ${percent(experiment.share)} of users take part.</p>
    <${Arms} experiment=${experiment} />
    <${Comparisons} experiment=${experiment} />
  </section>`;
}

function Arms({ experiment }) {
  const weights = experiment.arms.reduce((sum, arm) => sum + arm.weight, 0);
  const results = new Map((experiment.report?.arms ?? []).map((arm) => [arm.name, arm]));
  const control = experiment.arms[0]?.name;
  const x = scale([...results.values()].map((arm) => ({ value: arm.failure_rate, interval: arm.failure_interval })), true);
  return html`<div class="table-box" tabindex="0" role="region" aria-label=${`Arms of ${experiment.name}`}><table>
    <thead><tr>
      <th scope="col">Arm</th><th scope="col" class="wide">Served by</th><th scope="col" class="right wide">Share</th>
      <th scope="col" class="right">Requests</th><th scope="col" class="right">Failed</th><th scope="col" class="wide">95 % interval</th>
      <th scope="col" class="right">Latency</th><th scope="col" class="right widest">First token</th><th scope="col" class="right widest">Output tokens</th>
    </tr></thead>
    <tbody>${experiment.arms.map((arm) => html`<${Arm} key=${arm.name} arm=${arm} share=${weights ? arm.weight / weights : null}
      result=${results.get(arm.name)} x=${x} isControl=${arm.name === control} />`)}</tbody>
  </table></div>`;
}

function Arm({ arm, share, result, x, isControl }) {
  const interval = result?.requests ? result.failure_interval : null;
  return html`<tr data-testid="arm">
    <th scope="row">${arm.name}${isControl && arm.name !== "control" && html` <span class="hint">control</span>`}</th>
    <td class="wide">${[arm.backend, arm.model].filter(Boolean).join(" · ") || "as usual"}</td>
    <td class="right wide">${percent(share)}</td>
    <td class="right">${count(result?.requests ?? 0)}</td>
    <td class="right">${result?.requests ? percent(result.failure_rate) : "–"}
      ${interval && html`<div class="interval-text">${interval.map(percent).join(" to ")}</div>`}</td>
    <td class="wide">${interval ? html`<${Interval} x=${x} value=${result.failure_rate} interval=${interval} />` : "–"}</td>
    <td class="right">${milliseconds(result?.latency_ms)}</td>
    <td class="right widest">${milliseconds(result?.ttft_ms)}</td>
    <td class="right widest">${number(result?.output_tokens)}</td>
  </tr>`;
}

const isUnknown = (value) => value === null || value === undefined;

function Comparisons({ experiment }) {
  const comparisons = experiment.report?.comparisons ?? [];
  const isTooFew = comparisons.every((comparison) => isUnknown(comparison.p_value));
  const arms = [...new Set(comparisons.filter(({ value }) => !isUnknown(value)).map((comparison) => comparison.arm))];
  return html`
    ${isTooFew && html`<p data-testid="too-few"><b>Too few to tell.</b> Each arm needs some answered requests before they can be compared.</p>`}
    ${experiment.report?.complete === false && html`<p class="hint">The trail is still being read; these figures are of its first part.</p>`}
    ${arms.map((arm) => html`<${ArmComparison} key=${arm} arm=${arm} control=${experiment.arms[0]?.name}
      comparisons=${comparisons.filter((comparison) => comparison.arm === arm)} />`)}`;
}

function ArmComparison({ arm, control, comparisons }) {
  return html`<h3>${arm} compared with ${control}</h3>
    <div class="table-box" tabindex="0" role="region" aria-label=${`${arm} compared with ${control}`}><table>
      <thead><tr>
        <th scope="col">Measure</th><th scope="col" class="right wide">${control}</th><th scope="col" class="right wide">${arm}</th>
        <th scope="col" class="right">Difference</th><th scope="col" class="wide">95 % interval</th><th scope="col">Result</th>
      </tr></thead>
      <tbody>${comparisons.map((comparison) => html`<${Comparison} key=${comparison.measure} comparison=${comparison} />`)}</tbody>
    </table></div>`;
}

// In words what a comparison says: {kind, text}.
export function verdict(comparison) {
  const { isCost = null } = MEASURES[comparison.measure] ?? {};
  if (isUnknown(comparison.interval)) return { kind: "info", text: "too few to tell" };
  if (!comparison.significant) return { kind: "info", text: "no clear difference" };
  if (isCost === null) return { kind: "warning", text: comparison.difference > 0 ? "higher" : "lower" };
  return comparison.difference > 0 ? { kind: "bad", text: "worse" } : { kind: "good", text: "better" };
}

function Comparison({ comparison }) {
  const { name, show } = MEASURES[comparison.measure] ?? { name: comparison.measure, show: number };
  const { interval } = comparison;
  const { difference } = comparison;
  const { kind, text } = verdict(comparison);
  const x = scale([{ value: difference, interval }], false);
  const drawn = { good: "good", bad: "bad" }[kind] ?? "plain";
  return html`<tr data-testid="comparison" data-measure=${comparison.measure}>
    <th scope="row">${name}</th>
    <td class="right wide">${show(comparison.control)}</td><td class="right wide">${show(comparison.value)}</td>
    <td class="right">${signed(show, difference)}
      ${interval && html`<div class="interval-text">${interval.map((end) => signed(show, end)).join(" to ")}</div>`}</td>
    <td class="wide">${interval ? html`<${Interval} x=${x} value=${difference} interval=${interval} kind=${drawn} />` : "–"}</td>
    <td><${Badge} kind=${kind}>${text}<//> ${!isUnknown(comparison.p_value) && html`
      <span class="hint interval-text">p ${comparison.p_value < 0.001 ? "< 0.001" : `= ${comparison.p_value.toFixed(3)}`}</span>`}</td>
  </tr>`;
}
