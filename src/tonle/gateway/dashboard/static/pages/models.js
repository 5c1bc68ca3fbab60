// The page "Models": what requests can name, models and LoRA adapters; loading and removing adapters.

import { post } from "../api.js";
import { Sparkline } from "../charts.js";
import { count, number } from "../format.js";
import { html, useState } from "../html.js";
import { live, TRACK_SECONDS, useLive } from "../live.js";
import { Table } from "../table.js";
import { ActionButton, Badge, Card, inWords, Message, PageHeading, useGet, whyReadOnly } from "../widgets.js";
import { factWords } from "./model_facts.js";
import { modelRows } from "./model_rows.js";

export const title = "Models";

export default function ModelsPage({ session }) {
  const { event } = useLive();
  const listed = useGet(session.can_use_models ? "/v1/models" : null, {}, 10);
  const rows = modelRows(listed.data?.data, session.server.models, event?.backends ?? []);
  const readOnly = session.can_load_adapters ? null : whyReadOnly(session);
  return html`
    <${PageHeading} title=${title} />
    ${listed.error && html`<${Message} kind="bad">${listed.error}<//>`}
    <${Table} label="Models and adapters" testid="models" rows=${rows} rowKey=${(row) => row.id}
      columns=${columns(rows.some((row) => row.parent), readOnly, listed.reload)} sort=${{ id: "name", descending: false }} empty="No backend serves a model now." />
    <p class="hint"><span class="wide">Lines show requests that ended in the last ${TRACK_SECONDS / 60} minutes.</span>
      ${session.can_use_models ? "" : " This key may not use models, so only their names are known."}</p>
    ${session.has.adapters
      ? html`<${LoadAdapter} readOnly=${readOnly} bases=${rows.filter((row) => !row.parent && !row.kind)} onDone=${listed.reload} />`
      : html`<${Message}>This server loads no adapters while it runs. Start it with --enable-lora to load them here.<//>`}`;
}

function columns(hasAdapters, readOnly, onDone) {
  return [
    { id: "name", title: "Name", value: (row) => row.id, show: (row) => html`<b>${row.id}</b>` },
    { id: "kind", title: "Kind", value: (row) => row.parent ?? row.kind ?? "",
      show: kindCell },
    { id: "context", title: "Context, tokens", align: "right", wide: true, value: (row) => row.max_model_len ?? null, show: (row) => count(row.max_model_len) },
    { id: "backends", title: "Served by", wide: true, value: (row) => row.backends.join(", "), show: (row) => row.backends.join(", ") || "–" },
    { id: "requests", title: "Requests", align: "right", wide: true, value: perMinute, show: requestsCell },
    hasAdapters && { id: "action", title: "Action", sortable: false, show: (row) => row.parent && html`<${Unload} row=${row} readOnly=${readOnly} onDone=${onDone} />` },
  ].filter(Boolean);
}

// Of a worker pool with what it tells of its model: dimensions, sample rate, languages.
function kindCell(row) {
  if (row.parent) return html`<${Badge}>adapter<//> <span class="soft">of ${row.parent}</span>`;
  if (!row.kind) return html`<${Badge}>language model<//>`;
  return html`<${Badge}>${row.kind}<//> <span class="soft wide">${factWords(row.facts)}</span>`;
}

const perMinute = (row) => live.models.line(row.id, "requests").slice(-60).reduce((sum, times) => sum + (times ?? 0), 0);

function requestsCell(row) {
  const text = `${number(perMinute(row))}/min`;
  return html`<span class="with-line">${text}<${Sparkline} values=${live.models.line(row.id, "requests")} label=${`requests of ${row.id}, now ${text}`} /></span>`;
}

function Unload({ row, readOnly, onDone }) {
  const unload = async () => {
    await post("/v1/unload_lora_adapter", { lora_name: row.id, base_model: row.parent });
    await onDone();
  };
  return html`
    <${ActionButton} disabledReason=${readOnly} testid=${`unload-${row.id}`} label=${`Remove ${row.id}`} confirm="Remove this adapter?" onRun=${unload}>Remove<//>`;
}

function LoadAdapter({ readOnly, bases, onDone }) {
  const [fields, setFields] = useState({ lora_name: "", lora_path: "", base_model: "", load_inplace: false });
  const [answer, setAnswer] = useState(null); // {kind, text}
  const [isBusy, setBusy] = useState(false);
  const set = (name) => (event) => {
    const { type, checked, value } = event.currentTarget;
    setFields((before) => ({ ...before, [name]: type === "checkbox" ? checked : value }));
  };
  const load = async (event) => {
    event.preventDefault();
    setBusy(true);
    setAnswer(null);
    try {
      const { base_model: base, ...asked } = fields;
      const said = await post("/v1/load_lora_adapter", base ? { ...asked, base_model: base } : asked);
      setAnswer({ kind: "good", text: said });
      setFields((before) => ({ ...before, lora_name: "", lora_path: "" }));
      await onDone();
    } catch (problem) {
      setAnswer({ kind: "bad", text: inWords(problem) });
    }
    setBusy(false);
  };
  return html`
    <${Card} title="Load an adapter" testid="load-adapter">
      ${readOnly && html`<p class="hint">${readOnly}</p>`}
      <form onSubmit=${load}>
        <fieldset disabled=${readOnly !== null || isBusy}>
          <legend class="unseen">Adapter</legend>
          <div class="fields">
            <div class="field"><label for="lora-name">Name, as requests give it</label>
              <input id="lora-name" required value=${fields.lora_name} onInput=${set("lora_name")} data-testid="lora-name" /></div>
            <div class="field"><label for="lora-path">PEFT folder on the server</label>
              <input id="lora-path" required value=${fields.lora_path} onInput=${set("lora_path")} data-testid="lora-path" /></div>
            ${bases.length > 1 && html`
              <div class="field"><label for="lora-base">Model it is for</label>
                <select id="lora-base" required value=${fields.base_model} onChange=${set("base_model")}>
                  <option value="">Choose one</option>
                  ${bases.map((base) => html`<option key=${base.id} value=${base.id}>${base.id}</option>`)}
                </select></div>`}
            <label class="check"><input type="checkbox" checked=${fields.load_inplace} onChange=${set("load_inplace")} /> Replace one that has this name</label>
            <button type="submit" class="primary" aria-busy=${isBusy} data-testid="lora-load">Load</button>
          </div>
        </fieldset>
      </form>
      ${answer && html`<${Message} kind=${answer.kind} testid="lora-answer">${answer.text}<//>`}
    <//>`;
}
