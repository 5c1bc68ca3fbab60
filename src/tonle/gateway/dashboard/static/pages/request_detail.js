// One request: its explanation in sentences and as a waterfall, its numbers, its audit record.

import { sentence } from "../api.js";
import { count, dateTime, money, NONE, seconds } from "../format.js";
import { html, useEffect, useRef } from "../html.js";
import { go } from "../router.js";
import { CopyButton, Message, useGet } from "../widgets.js";
import { RecordView, VerifyState } from "./record_view.js";
import { StatusBadge } from "./status_badge.js";
import { Waterfall } from "./waterfall.js";

// `number`: which one, of several with this id; null: the newest.
export function RequestDetail({ id, number, session }) {
  const { data, error, isLoading } = useGet(`/dashboard/api/requests/${encodeURIComponent(id)}`, { number });
  const heading = useRef(null);
  useEffect(() => heading.current?.focus(), [id]);
  const onKeyDown = (event) => event.key === "Escape" && go("#/requests");
  return html`<article class="card request-detail" aria-labelledby="request-heading" data-testid="request-detail" onKeyDown=${onKeyDown}>
    <div class="detail-head">
      <h2 id="request-heading" tabindex="-1" ref=${heading}>Request <code>${id}</code></h2>
      <a class="button" href="#/requests" data-testid="close-detail">Close</a>
    </div>
    ${isLoading && !data && html`<p class="hint">Loading …</p>`}
    ${error && html`<${Message} kind="bad">${error} The page keeps the last 5,000 requests that have ended.<//>`}
    ${data && html`<${Detail} data=${data} session=${session} />`}
  </article>`;
}

function Detail({ data, session }) {
  const { request, explanation, audit } = data;
  return html`
    <section><h3>Where the time went</h3>
      ${explanation?.sentences.length > 0 && html`<ul class="sentences" data-testid="sentences">
        ${explanation.sentences.map((text, i) => html`<li key=${i}>${text}</li>`)}</ul>`}
      ${explanation ? html`<${Waterfall} explanation=${explanation} />` : html`<p class="hint">No times are known for this request.</p>`}
    </section>
    <section><h3>The request</h3><${Facts} request=${request} route=${audit?.record?.route ?? {}} /></section>
    <section><h3>Audit record</h3><${Audit} audit=${audit} /></section>
    <section><h3>The same from a terminal</h3><${Commands} id=${request.id} session=${session} /></section>`;
}

// `route`: as the audit record has it.
function Facts({ request, route }) {
  const why = request.why ?? route.why;
  const failed = request.failed ?? route.failed ?? [];
  const facts = [
    ["Status", html`<${StatusBadge} status=${request.status} /> ${request.http_status || ""} ${request.error ?? ""}`],
    ["Arrived", dateTime(request.time)],
    ["Path", html`<code>${request.path}</code>${request.stream ? ", streamed" : ""}`],
    ["Model", request.model],
    ["Adapter", request.adapter],
    ["Key", named(request.key, request.key_id)],
    ["Tokens", request.pool && !request.prompt_tokens && !request.completion_tokens ? null : tokens(request)],
    ["Sound", request.audio_s ? seconds(request.audio_s) : null],
    ["Characters spoken", request.characters ? count(request.characters) : null],
    ["Images", request.images ? count(request.images) : null],
    ["Time to first token", request.ttft_s === null ? null : seconds(request.ttft_s)],
    ["Between two tokens", request.itl_s === null ? null : seconds(request.itl_s)],
    ["Total", seconds(request.total_s)],
    ["Backend", request.backend],
    ["Worker pool", request.pool],
    ["Chosen because", WHY[why] ?? why],
    ["Failed before it", failed.join(", ")],
    ["Response cache", CACHE[request.cache] ?? request.cache],
    ["Experiment", request.experiment && `${request.experiment}, arm ${request.arm ?? NONE}`],
    ["Cost", request.cost === null || request.cost === undefined ? null : money(request.cost)],
    ["Trace", request.trace_id && html`<code>${request.trace_id}</code>`],
  ].filter(([, value]) => value !== null && value !== undefined && value !== "");
  return html`<dl class="fact-grid" data-testid="facts">${facts.map(([name, value]) => html`
    <div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

// Why that backend, by the word of the router.
const WHY = {
  only: "it is the only one for this model",
  experiment: "the experiment's arm names it",
  length: "prompts of this length go there",
  prefix: "prompts that begin like this one go there",
  load: "it had the least to do",
  hedge: "it answered before the one that was asked first",
};

const CACHE = { hit: "answered from it", miss: "not found in it", bypass: "not used" };

const named = (name, id) => (name && id && name !== id ? `${name} (${id})` : name || id);

function tokens({ prompt_tokens: prompt, cached_tokens: cached, completion_tokens: completion }) {
  const fromCache = cached ? `, ${count(cached)} of them from the prefix cache` : "";
  return `${count(prompt)} in the prompt${fromCache}; ${count(completion)} in the answer`;
}

function Audit({ audit }) {
  if (!audit?.record) return html`<p class="hint" data-testid="no-record">${sentence(audit?.detail || "there is no record of it")}</p>`;
  return html`<${VerifyState} verified=${audit.verified} detail=${audit.detail} />
    <details class="fold" data-testid="audit-record"><summary>Show the record</summary>
      <${RecordView} record=${audit.record} /></details>`;
}

function Commands({ id, session }) {
  const key = session.key ? ' -H "Authorization: Bearer $TONLE_API_KEY"' : "";
  const url = `${window.location.origin}/v1/requests/${encodeURIComponent(id)}/explain`;
  const told = `--url ${window.location.origin}${session.key ? ' --api-key "$TONLE_API_KEY"' : ""}`;
  return html`${[`curl${key} '${url}'`, `tonle explain ${id} ${told}`].map((text) => html`<div class="code-sample" key=${text}>
    <pre tabindex="0">${text}</pre><${CopyButton} text=${text} /></div>`)}`;
}
