// The page "Requests": the latest ones, live, with filters. A row opens its explanation (#/requests/ID?number=N; without a number: the newest of that id).

import { clock, count, NONE, seconds } from "../format.js";
import { html, useEffect, useMemo, useRef, useState } from "../html.js";
import { live } from "../live.js";
import { go } from "../router.js";
import { Table } from "../table.js";
import { Message, PageHeading } from "../widgets.js";
import { RequestDetail } from "./request_detail.js";
import { choices, filtered, keyOf, MOST_ROWS, NO_FILTER, requestRows } from "./request_rows.js";
import { StatusBadge } from "./status_badge.js";

export const title = "Requests";

const figure = (id, title, field, show) => (
  { id, title, value: (row) => row[field], show: (row) => show(row[field]), align: "right", width: "10ch", wide: true }
);

const COLUMNS = [
  { id: "time", title: "Time", value: (row) => row.time, show: (row) => clock(row.time), width: "9ch" },
  { id: "status", title: "Status", value: (row) => row.status, show: (row) => html`<${StatusBadge} status=${row.status} />`, width: "12ch" },
  { id: "model", title: "Model", value: (row) => row.model || null, width: "min(17ch, 25vw)" },
  { id: "key", title: "Key", value: (row) => keyOf(row) || null, width: "12ch", wide: true },
  { ...figure("total", "Total", "total_s", seconds), wide: false },
  { ...figure("ttft", "First token", "ttft_s", seconds), width: "12ch" },
  { ...figure("prompt", "Prompt", "prompt_tokens", count), show: prompt, width: "14ch" },
  { ...figure("answer", "Answer", "completion_tokens", count), show: answer, wide: "most" },
  { ...figure("itl", "Per token", "itl_s", seconds), width: "11ch", wide: "most" },
  { ...figure("queue", "Queue", "queue_s", seconds), wide: "most" },
  { id: "backend", title: "Backend", value: (row) => row.backend || null, width: "9ch", wide: "most" },
];
// Beside an open request there is room for these.
const FEW_COLUMNS = COLUMNS.filter((column) => ["time", "status", "model", "total"].includes(column.id));

// Refused requests and those for worker pools have none.
const hasTokens = (row) => Boolean(row.prompt_tokens || row.completion_tokens);

function answer(row) {
  return hasTokens(row) ? count(row.completion_tokens) : NONE;
}

function prompt(row) {
  if (!hasTokens(row)) return NONE;
  return row.cached_tokens ? html`<span title=${`${count(row.cached_tokens)} of them from the prefix cache`}>
    ${count(row.prompt_tokens)} <span class="hint">(${count(row.cached_tokens)})</span></span>` : count(row.prompt_tokens);
}

function useRows() {
  const [, update] = useState(0);
  useEffect(() => {
    const forget = requestRows.listen(() => update((times) => times + 1));
    const take = () => requestRows.take(live.event);
    const end = live.listen(take);
    requestRows.fill();
    take();
    return () => {
      forget();
      end();
    };
  }, []);
  return requestRows;
}

const tableHeight = () => Math.max(320, window.innerHeight - 250);

function useTableHeight() {
  const [height, setHeight] = useState(tableHeight);
  useEffect(() => {
    const update = () => setHeight(tableHeight());
    window.addEventListener("resize", update);
    return () => window.removeEventListener("resize", update);
  }, []);
  return height;
}

// Conditions in the address (#/requests?status=failed) are taken over; the address of one request has none, and changes none.
function useFilter(params) {
  const [filter, setFilter] = useState(NO_FILTER);
  useEffect(() => {
    const given = Object.keys(NO_FILTER).filter((name) => params.has(name));
    if (given.length) setFilter({ ...NO_FILTER, ...Object.fromEntries(given.map((name) => [name, params.get(name)])) });
  }, [String(params)]);
  return [filter, setFilter];
}

// When a request is closed, the keyboard goes back to the list.
function useReturn(id) {
  const list = useRef(null);
  const wasOpen = useRef(false);
  useEffect(() => {
    if (wasOpen.current && !id) list.current.querySelector(".table-box")?.focus({ preventScroll: true });
    wasOpen.current = Boolean(id);
  }, [id]);
  return list;
}

export default function RequestsPage({ session, rest, params }) {
  const id = rest[0] ?? null;
  const state = useRows();
  const number = id && (Number(params.get("number")) || (state.rows.find((row) => row.id === id)?.number ?? null));
  const [filter, setFilter] = useFilter(params);
  const height = useTableHeight();
  const list = useReturn(id);
  const rows = useMemo(() => filtered(state.rows, filter), [state.rows, filter]);
  const isFiltered = rows !== state.rows;
  const open = (row) => go(row.number === number ? "#/requests" : `#/requests/${encodeURIComponent(row.id)}?number=${row.number}`);
  return html`
    <${PageHeading} title=${title}><${Tools} state=${state} /><//>
    <div class=${`requests${id ? " has-detail" : ""}`}>
      <div class="requests-list" ref=${list}>
        <${Filters} state=${state} filter=${filter} setFilter=${setFilter} />
        ${state.error && html`<${Message} kind="bad">${state.error}<//>`}
        <p class="hint" data-testid="requests-count">${told(state, rows.length, isFiltered)}</p>
        <${Table} label="Requests" testid="requests-table" rows=${rows} columns=${id ? FEW_COLUMNS : COLUMNS}
          rowKey=${(row) => row.number} sort=${{ id: "time", descending: true }} height=${height} onOpen=${open} openKey=${number}
          empty=${isFiltered ? "No request meets these conditions." : state.isLoading ? "Loading …" : "No request has ended since the server started."} />
      </div>
      ${id && html`<${RequestDetail} key=${`${id} ${params.get("number")}`} id=${id} number=${params.get("number")} session=${session} />`}
    </div>`;
}

function told(state, num, isFiltered) {
  const all = `${count(state.rows.length)} ${state.rows.length === 1 ? "request" : "requests"}`;
  const text = isFiltered ? `${count(num)} of ${all}` : `${all}; the last ${count(MOST_ROWS)} are kept`;
  return state.isLoading ? `${text} – loading …` : text;
}

function Tools({ state }) {
  const text = state.isPaused ? `Resume${state.numWaiting ? ` (${count(state.numWaiting)} new)` : ""}` : "Pause";
  return html`<button type="button" data-testid="pause" aria-pressed=${state.isPaused ? "true" : "false"}
    onClick=${() => state.setPaused(!state.isPaused)}>${text}</button>`;
}

function Filters({ state, filter, setFilter }) {
  const set = (name) => (event) => setFilter({ ...filter, [name]: event.target.value });
  const lists = useMemo(() => choices(state.rows), [state.rows]);
  const isSet = Object.values(filter).some(Boolean);
  return html`<form class="filters" role="search" aria-label="Requests" onSubmit=${(event) => event.preventDefault()}>
    <label class="field grow"><span>Search</span>
      <input type="search" data-testid="filter-text" value=${filter.text} placeholder="id, model, key, error, trace" onInput=${set("text")} /></label>
    ${Object.entries(lists).map(([name, list]) => html`<label class="field" key=${name}><span>${name[0].toUpperCase() + name.slice(1)}</span>
      <select data-testid=${`filter-${name}`} value=${filter[name]} onChange=${set(name)}>
        <option value="">all</option>
        ${[...new Set([...list, filter[name]])].filter(Boolean).map((value) => html`<option key=${value} value=${value}>${value}</option>`)}
      </select></label>`)}
    ${isSet && html`<button type="button" data-testid="filter-clear" onClick=${() => setFilter(NO_FILTER)}>Clear</button>`}
  </form>`;
}
