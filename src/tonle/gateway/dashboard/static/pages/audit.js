// The page "Audit": search, one record (#/audit/ID), the state of the trail, and a verification now.

import { post, sentence } from "../api.js";
import { count, seconds } from "../format.js";
import { html, useState } from "../html.js";
import { go } from "../router.js";
import { Table } from "../table.js";
import { ActionButton, Badge, Message, PageHeading, useGet } from "../widgets.js";
import { RecordView, VerifyState } from "./record_view.js";
import { STATUSES, StatusBadge } from "./status_badge.js";

export const title = "Audit";

const NO_SEARCH = { text: "", key: "", model: "", status: "", from: "", to: "" };
const PAGE_ROWS = 50;
const MOST_ROWS = 500; // that the server gives

export default function AuditPage({ session, rest }) {
  if (!session.has?.audit) return html`<${PageHeading} title=${title} /><${NoTrail} />`;
  const id = rest[0] ?? null;
  return html`<${PageHeading} title=${title} />
    ${id ? html`<${OneRecord} key=${id} id=${id} />` : html`<${Search} />`}`;
}

function NoTrail() {
  return html`<${Message} testid="no-audit">This server keeps no audit trail. The setting <code>audit_dir</code> names a directory for
    one; each request then leaves a record that cannot be changed unnoticed.<//>`;
}

function Search() {
  const [typed, setTyped] = useState(NO_SEARCH);
  const [asked, setAsked] = useState({ ...NO_SEARCH, limit: PAGE_ROWS });
  const { data, error, isLoading } = useGet("/dashboard/api/audit", { ...asked, to: endOf(asked.to) });
  const set = (name) => (event) => setTyped({ ...typed, [name]: event.target.value });
  const submit = (event) => {
    event.preventDefault();
    setAsked({ ...typed, limit: PAGE_ROWS });
  };
  const clear = () => {
    setTyped(NO_SEARCH);
    setAsked({ ...NO_SEARCH, limit: PAGE_ROWS });
  };
  const records = data?.records ?? [];
  const hasMore = records.length >= asked.limit && asked.limit < MOST_ROWS;
  return html`
    ${data && html`<${TrailState} state=${data.state} />`}
    <form class="filters" role="search" aria-label="Audit records" onSubmit=${submit}>
      <label class="field grow"><span>Text</span><input type="search" dir="auto" data-testid="audit-text" value=${typed.text}
        placeholder="in a prompt or an answer" onInput=${set("text")} /></label>
      <label class="field"><span>Key</span><input class="short" data-testid="audit-key" value=${typed.key} placeholder="id" onInput=${set("key")} /></label>
      <label class="field"><span>Model</span><input class="short" data-testid="audit-model" value=${typed.model} onInput=${set("model")} /></label>
      <label class="field"><span>Status</span><select data-testid="audit-status" value=${typed.status} onChange=${set("status")}>
        <option value="">all</option>${STATUSES.map((status) => html`<option key=${status} value=${status}>${status}</option>`)}</select></label>
      <label class="field"><span>From</span><input type="date" data-testid="audit-from" value=${typed.from} onChange=${set("from")} /></label>
      <label class="field"><span>To</span><input type="date" data-testid="audit-to" value=${typed.to} onChange=${set("to")} /></label>
      <button type="submit" class="primary" data-testid="audit-search">Search</button>
      ${JSON.stringify(typed) !== JSON.stringify(NO_SEARCH) && html`<button type="button" onClick=${clear}>Clear</button>`}
    </form>
    ${error && html`<${Message} kind="bad">${error}<//>`}
    <${Table} label="Audit records" testid="audit-table" rows=${records} columns=${COLUMNS} rowKey=${(row) => `${row.day}/${row.file}`}
      onOpen=${(row) => go(`#/audit/${encodeURIComponent(row.id ?? row.request_id)}`)}
      empty=${isLoading ? "Searching …" : "No record meets these conditions."} />
    ${hasMore && html`<button type="button" data-testid="audit-more" onClick=${() => setAsked({ ...asked, limit: Math.min(asked.limit * 2, MOST_ROWS) })}>Show more</button>`}`;
}

// The last day counts, to its end (UTC).
const endOf = (day) => (day ? `${day}T23:59:59.999999` : "");

const shownTime = (text) => (text ? text.slice(0, 19).replace("T", " ") : "–");

const COLUMNS = [
  { id: "time", title: "Time (UTC)", value: (row) => row.time, show: (row) => shownTime(row.time) },
  { id: "status", title: "Status", value: (row) => row.status, show: (row) => html`<${StatusBadge} status=${row.status} />` },
  { id: "endpoint", title: "Path", value: (row) => row.endpoint, wide: "most" },
  { id: "model", title: "Model", value: (row) => row.adapter ?? row.model },
  { id: "key", title: "Key", value: (row) => row.key_id, wide: true },
  { id: "prompt", title: "Prompt", value: (row) => row.prompt_tokens, show: (row) => count(row.prompt_tokens), align: "right", wide: true },
  { id: "answer", title: "Answer", value: (row) => row.completion_tokens, show: (row) => count(row.completion_tokens), align: "right", wide: true },
  { id: "total", title: "Total", value: (row) => row.total_ms, show: (row) => seconds(row.total_ms === null ? null : row.total_ms / 1000), align: "right" },
];

function TrailState({ state }) {
  const [report, setReport] = useState(null);
  const verify = async () => {
    setReport(null);
    setReport(await post("/dashboard/api/audit/verify"));
  };
  return html`<section class="card trail" data-testid="trail-state">
    <div class="trail-head"><h2>The trail <${Badge} kind=${state.alarm ? "bad" : "good"}>${state.alarm ? "alarm" : "no alarm"}<//></h2>
      <${ActionButton} testid="verify-now" onRun=${verify}>Verify now<//></div>
    ${state.alarm && html`<${Message} kind="bad" testid="audit-alarm">${sentence(state.alarm)}<//>`}
    <dl class="fact-grid">
      <div><dt>Records</dt><dd data-testid="trail-records">${count(state.records)}</dd></div>
      <div><dt>Last seal</dt><dd data-testid="last-seal">${state.last_seal ? `${shownTime(state.last_seal)} UTC` : "none yet"}</dd></div>
      <div><dt>Fingerprint of the key</dt><dd><code data-testid="fingerprint">${state.key_fingerprint || "–"}</code></dd></div>
      <div><dt>Directory</dt><dd><code>${state.directory}</code></dd></div>
    </dl>
    ${report && html`<${Report} report=${report} />`}
  </section>`;
}

function Report({ report }) {
  return html`<div data-testid="verify-report" data-ok=${report.ok ? "true" : "false"}>
    <${Message} kind=${report.ok ? "good" : "bad"}>${sentence(report.summary)}<//>
    ${report.findings.length > 0 && html`<ul class="findings" data-testid="findings">${report.findings.map((finding, i) => html`
      <li key=${i}>${finding}</li>`)}</ul>`}
  </div>`;
}

function OneRecord({ id }) {
  const { data, error, isLoading } = useGet(`/dashboard/api/audit/${encodeURIComponent(id)}`);
  return html`<article class="card" data-testid="audit-record-page">
    <div class="detail-head"><h2>Record <code>${id}</code></h2><a class="button" href="#/audit">All records</a></div>
    ${isLoading && !data && html`<p class="hint">Loading …</p>`}
    ${error && html`<${Message} kind="bad">${error}<//>`}
    ${data && html`
      <${VerifyState} verified=${data.verified} detail=${data.detail} />
      ${data.redacted?.length > 0 && html`<${Message} kind="warning" testid="redacted-fields">Redacted: ${data.redacted.join(", ")}. The chain still proves that
        a record was here, and that the rest of it is unchanged.<//>`}
      ${data.record.request_id && html`<p><a href=${`#/requests/${encodeURIComponent(data.record.request_id)}`}>Where its time went</a>
        <span class="hint"> (for the last 5,000 requests)</span></p>`}
      <${RecordView} record=${data.record} />`}
  </article>`;
}
