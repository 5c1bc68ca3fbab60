// The page "Usage": requests, tokens, sound, images, computing time and cost, by key, model and day.

import { withParams } from "../api.js";
import { count, money, NONE, seconds } from "../format.js";
import { html, useMemo, useState } from "../html.js";
import { Table } from "../table.js";
import { Message, PageHeading, useGet } from "../widgets.js";
import { DayBars } from "./day_bars.js";
import { addUp, byDay, grouped, isoDay, measuresOf, widths } from "./usage_sums.js";

export const title = "Usage";

const RANGES = [["today", 1], ["7 days", 7], ["30 days", 30], ["90 days", 90]];
const GROUPS = [["key", "key"], ["model", "model"], ["day", "day"], ["all", "key, model and day"]];
const SHOWN = { count, seconds: (value) => (value === 0 ? "0 s" : seconds(value)), money };
const shownOf = (one, row) => (one.isMedia && !row[one.id] ? NONE : SHOWN[one.unit](row[one.id]));

const latest = (days) => ({ from: isoDay(-(days - 1)), to: isoDay(0) });

export default function UsagePage({ session }) {
  const [range, setRange] = useState(latest(30));
  const [group, setGroup] = useState("key");
  const [measure, setMeasure] = useState("completion_tokens");
  const isValid = range.from && range.to && range.from <= range.to;
  const { data, error, isLoading } = useGet(isValid ? "/dashboard/api/usage" : null, range);
  const rows = data?.rows ?? [];
  const measures = measuresOf(rows, session.has.price);
  const hasCost = measures.some((one) => one.id === "cost");
  const shown = measures.find((one) => one.id === measure) ?? measures[0];
  const days = useMemo(() => byDay(rows, range.from, range.to), [rows, range.from, range.to]);
  return html`
    <${PageHeading} title=${title}>
      <a class="button" data-testid="usage-csv" href=${withParams("/dashboard/api/usage.csv", range)} download=${`usage-${range.from}-${range.to}.csv`}>Download CSV</a>
    <//>
    <form class="filters" onSubmit=${(event) => event.preventDefault()}>
      <${RangeFields} range=${range} setRange=${setRange} />
      <label class="field"><span>Chart</span><select data-testid="usage-measure" value=${shown.id} onChange=${(event) => setMeasure(event.target.value)}>
        ${measures.map((one) => html`<option key=${one.id} value=${one.id}>${one.name}</option>`)}</select></label>
      <label class="field"><span>Table by</span><select data-testid="usage-group" value=${group} onChange=${(event) => setGroup(event.target.value)}>
        ${GROUPS.map(([id, name]) => html`<option key=${id} value=${id}>${name}</option>`)}</select></label>
    </form>
    ${!isValid && html`<${Message} kind="warning">The first day must not be after the last.<//>`}
    ${error && html`<${Message} kind="bad">${error}<//>`}
    ${isLoading && !data && html`<p class="hint">Loading …</p>`}
    ${data && html`
      ${!hasCost && html`<${Message} testid="no-price">There is no cost, because no price is set. The setting
        ${" "}<code>price_per_hour</code>, also of a backend, is the price of an hour of the machine that computes.<//>`}
      ${session.has?.history === "memory" && html`<p class="hint">Usage is kept in memory and begins anew when the server starts; the setting
        ${" "}<code>history_db</code> names a file for it.</p>`}
      <section class="card usage-chart"><h2>${shown.name} per day (UTC)</h2>
        <${DayBars} days=${days} measure=${shown} show=${SHOWN[shown.unit]} /></section>
      <${UsageTable} key=${group} rows=${rows} group=${group} measures=${measures} chosen=${shown.id} />`}`;
}

function RangeFields({ range, setRange }) {
  const set = (name) => (event) => setRange({ ...range, [name]: event.target.value });
  return html`
    <div class="choices" role="group" aria-label="Range">${RANGES.map(([name, days]) => {
      const wanted = latest(days);
      const isChosen = wanted.from === range.from && wanted.to === range.to;
      return html`<button type="button" key=${name} aria-pressed=${isChosen ? "true" : "false"} onClick=${() => setRange(wanted)}>${name}</button>`;
    })}</div>
    <label class="field"><span>From</span><input type="date" data-testid="usage-from" value=${range.from} max=${range.to} onChange=${set("from")} /></label>
    <label class="field"><span>To</span><input type="date" data-testid="usage-to" value=${range.to} min=${range.from} onChange=${set("to")} /></label>`;
}

const name = (id) => (row) => html`<span class="usage-name">${NAMES[id].value(row)}</span>`;

const NAMES = {
  day: { id: "day", title: "Day", value: (row) => row.day, width: "12ch" },
  key: { id: "key", title: "Key", value: (row) => row.key_name || row.key_id || "no key", show: name("key") },
  model: { id: "model", title: "Model", value: (row) => row.model || "no model", show: name("model") },
};

function UsageTable({ rows, group, measures, chosen }) {
  const names = group === "all" ? [NAMES.day, NAMES.key, NAMES.model] : [NAMES[group]];
  const wide = widths(measures, chosen);
  const columns = [...names, ...measures.map((one, i) => ({
    id: one.id, title: one.name, align: "right", wide: wide[i], value: (row) => row[one.id], show: (row) => shownOf(one, row),
  }))];
  const shown = useMemo(() => grouped(rows, group), [rows, group]);
  const sort = group === "all" || group === "day" ? { id: "day", descending: true } : { id: "completion_tokens", descending: true };
  return html`<div class="usage-table"><${Table} label="Usage" testid="usage-table" rows=${shown} columns=${columns} rowKey=${(row) => row.id} sort=${sort}
      empty="No request in this range." /></div>
    ${shown.length > 0 && html`<${Totals} rows=${rows} measures=${measures} />`}`;
}

function Totals({ rows, measures }) {
  const sum = addUp(rows);
  return html`<section class="card"><h2>Total</h2><dl class="figures totals" data-testid="usage-totals">${measures.map((one) => html`
    <div key=${one.id}><dt>${one.name}</dt><dd data-testid=${`total-${one.id}`}>${SHOWN[one.unit](sum[one.id])}</dd></div>`)}</dl></section>`;
}
