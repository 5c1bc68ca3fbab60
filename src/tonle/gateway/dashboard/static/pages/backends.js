// The page "Backends": the servers, or the engine, that compute; what they do now; taking one out of use.

import { post } from "../api.js";
import { Sparkline } from "../charts.js";
import { count, NONE, number, percent } from "../format.js";
import { html } from "../html.js";
import { live, TRACK_SECONDS, useLive } from "../live.js";
import { Table } from "../table.js";
import { ActionButton, Badge, Message, PageHeading, whyReadOnly } from "../widgets.js";

export const title = "Backends";

export default function BackendsPage({ session }) {
  const { event } = useLive();
  const rows = event?.backends ?? [];
  const readOnly = whyReadOnly(session);
  return html`
    <${PageHeading} title=${title} />
    ${readOnly && html`<${Message} testid="read-only">${readOnly}<//>`}
    <${Table} label="Backends" testid="backends" rows=${rows} rowKey=${(row) => row.name} columns=${columns(rows, readOnly)}
      sort=${{ id: "name", descending: false }} empty=${event ? "No backend is configured." : "Waiting for figures…"} />
    ${rows.filter((row) => row.warning).map((row) => html`<${Message} key=${row.name} kind="warning"><b>${row.name}</b>: ${row.warning}<//>`)}
    <p class="hint">Lines show the last ${TRACK_SECONDS / 60} minutes. A drained backend finishes the requests it has and gets no new ones.</p>`;
}

const state = (row, name) => row.state?.[name] ?? null;
const running = (row) => state(row, "running") ?? row.running;
const waiting = (row) => state(row, "waiting") ?? row.waiting;

function columns(rows, readOnly) {
  const hasGpu = rows.some((row) => state(row, "gpu_utilization") !== null);
  return [
    { id: "name", title: "Name", value: (row) => row.name, show: nameCell },
    { id: "state", title: "State", value: stateOf, show: stateCell },
    { id: "models", title: "Models", value: (row) => row.models.join(", "), show: (row) => row.models.join(", ") || NONE, wide: "most" },
    { id: "running", title: "Running", align: "right", value: running, show: (row) => lineCell(row, "running", count(running(row))) },
    { id: "waiting", title: "Waiting", align: "right", wide: true, value: waiting, show: (row) => count(waiting(row)) },
    { id: "tokens", title: "Tokens/s", align: "right", wide: true, value: tokensPerSecond, show: (row) => lineCell(row, "tokens_per_s", number(tokensPerSecond(row))) },
    { id: "kv", title: "KV cache", align: "right", wide: true, value: (row) => state(row, "kv_usage"),
      show: (row) => lineCell(row, "kv_usage", percent(state(row, "kv_usage")), 1) },
    hasGpu && { id: "gpu", title: "GPU", align: "right", wide: "most", value: (row) => state(row, "gpu_utilization"), show: (row) => percent(state(row, "gpu_utilization")) },
    { id: "prefix", title: "Prefix hits", align: "right", wide: "most", value: prefixRate, show: (row) => percent(prefixRate(row)) },
    { id: "sent", title: "Sent", align: "right", wide: "most", value: (row) => row.sent, show: (row) => count(row.sent) },
    { id: "failed", title: "Failed", align: "right", wide: "most", value: (row) => row.failed, show: (row) => count(row.failed) },
    { id: "action", title: "Action", sortable: false, show: (row) => html`<${Drain} row=${row} readOnly=${readOnly} />` },
  ].filter(Boolean);
}

function nameCell(row) {
  return html`<b>${row.name}</b> <span class="soft">${row.kind}${row.role && row.role !== "any" ? `, ${row.role}` : ""}</span>
    ${row.url.startsWith("http") && row.url !== row.name && html`<div class="hint wide">${row.url}</div>`}`;
}

function stateOf(row) {
  if (row.leaving) return "leaving";
  if (row.draining) return running(row) > 0 ? "draining" : "drained";
  if (row.breaker === "open") return "resting";
  if (!row.available) return "not available";
  return row.breaker === "half open" ? "on trial" : "available";
}

const KINDS = { available: "good", leaving: "warning", draining: "warning", drained: "warning", "on trial": "warning", resting: "bad", "not available": "bad" };

// The reason is part of the cell, not of a tooltip: it is what an operator looks for.
function stateCell(row) {
  const words = stateOf(row);
  const reason = row.unhealthy_reason || (words === "resting" ? "too many failures; it is tried again shortly" : "");
  return html`<${Badge} kind=${KINDS[words]}>${words}<//>${reason && html`<div class="hint reason">${reason}</div>`}`;
}

function lineCell(row, figure, text, max = null) {
  const line = live.backends.line(row.name, figure);
  const isKnown = line.some((value) => value !== null);
  return html`<span class="with-line">${text}
    ${isKnown && html`<${Sparkline} values=${line} max=${max} label=${`${figure.replaceAll("_", " ")} of ${row.name}, now ${text}`} />`}</span>`;
}

const tokensPerSecond = (row) => live.backends.line(row.name, "tokens_per_s").at(-1);
const prefixRate = (row) => (state(row, "prefix_queries") ? state(row, "prefix_hits") / state(row, "prefix_queries") : null);

function Drain({ row, readOnly }) {
  if (row.leaving) return null;
  const act = row.draining ? "resume" : "drain";
  const words = row.draining ? "Resume" : "Drain";
  return html`
    <${ActionButton} key=${act} disabledReason=${readOnly} testid=${`${act}-${row.name}`} label=${`${words} ${row.name}`}
      confirm=${row.draining ? null : "Send it nothing new?"}
      onRun=${() => post(`/admin/backends/${encodeURIComponent(row.name)}/${act}`)}>${words}<//>`;
}
