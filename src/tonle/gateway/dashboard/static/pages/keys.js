// The page "Keys": who may call this server, how much they used today; creating and revoking keys.

import { del } from "../api.js";
import { Sparkline } from "../charts.js";
import { count, day, number, percent } from "../format.js";
import { html, useState } from "../html.js";
import { live, TRACK_SECONDS, useLive } from "../live.js";
import { Table } from "../table.js";
import { ActionButton, Badge, Message, PageHeading, useGet, whyReadOnly } from "../widgets.js";
import { CreateKey } from "./create_key.js";

export const title = "Keys";

export default function KeysPage({ session }) {
  if (!session.has.keys) {
    return html`<${PageHeading} title=${title} />
      <${Message} testid="no-key-store">This server has no key store: its keys, if it has any, are in its settings. Start it with
        --admin-key KEY or --state-db PLACE to create and revoke keys here.<//>`;
  }
  return html`<${KeyList} session=${session} readOnly=${whyReadOnly(session)} />`;
}

function KeyList({ session, readOnly }) {
  useLive();
  const [showsRevoked, setShowsRevoked] = useState(false);
  const listed = useGet("/admin/keys", {}, 10);
  const keys = listed.data?.keys ?? [];
  const rows = showsRevoked ? keys : keys.filter((key) => !key.revoked);
  const numRevoked = keys.filter((key) => key.revoked).length;
  return html`
    <${PageHeading} title=${title}>
      ${numRevoked > 0 && html`
        <label class="check"><input type="checkbox" checked=${showsRevoked} onChange=${() => setShowsRevoked(!showsRevoked)} /> Show ${count(numRevoked)} revoked</label>`}
    <//>
    ${readOnly
      ? html`<${Message} testid="read-only">${readOnly}<//>`
      : html`<${CreateKey} models=${session.server.models} onDone=${listed.reload} />`}
    ${listed.error && html`<${Message} kind="bad">${listed.error}<//>`}
    <${Table} label="Keys" testid="keys" rows=${rows} rowKey=${(row) => row.id} columns=${columns(listed.reload, readOnly)}
      sort=${{ id: "name", descending: false }} empty=${listed.isLoading ? "Loading…" : readOnly ? "No keys yet." : "No keys yet. Create one above."} />
    <p class="hint">Days begin at 00:00 UTC. Requests with a revoked key are refused at once. Keys that stand in the server's settings are not listed.
      <span class="wide"> Lines show requests that ended in the last ${TRACK_SECONDS / 60} minutes.</span></p>`;
}

function columns(onDone, readOnly) {
  return [
    { id: "name", title: "Name", value: (row) => row.name, show: (row) => html`<b>${row.name}</b><div class="hint"><code>${row.id}</code></div>` },
    { id: "scopes", title: "May", value: (row) => row.scopes.join(", "), wide: true, show: mayCell },
    { id: "used", title: "Tokens today", align: "right", value: (row) => row.tokens_today, show: usedCell },
    { id: "limits", title: "Limits", sortable: false, wide: true, show: limitsCell },
    { id: "requests", title: "Requests", align: "right", wide: true, value: perMinute, show: requestsCell },
    { id: "created", title: "Created", wide: true, value: (row) => row.created, show: (row) => html`<span class="number">${day(row.created)}</span>` },
    { id: "action", title: "Action", sortable: false, show: (row) => html`<${Revoke} row=${row} readOnly=${readOnly} onDone=${onDone} />` },
  ];
}

function mayCell(row) {
  return html`${row.scopes.join(", ")}
    ${row.models.length > 0 && html`<div class="hint">models: ${row.models.join(", ")}</div>`}
    ${row.tenant && html`<div class="hint">tenant: ${row.tenant}</div>`}`;
}

function usedCell(row) {
  const limit = row.limits?.tokens_per_day;
  if (!limit) return count(row.tokens_today);
  return html`${count(row.tokens_today)}<div class="hint">${percent(row.tokens_today / limit)} of ${count(limit)}</div>`;
}

const LIMITS = { requests_per_minute: "requests/min", tokens_per_minute: "tokens/min", max_concurrent: "at once", tokens_per_day: "tokens/day",
  audio_seconds_per_minute: "seconds of sound/min", images_per_minute: "images/min" };

function limitsCell(row) {
  const own = Object.entries(LIMITS).filter(([name]) => row.limits?.[name]);
  if (!own.length) return html`<span class="soft">the server's</span>`;
  return own.map(([name, unit]) => html`<div key=${name}>${count(row.limits[name])} ${unit}</div>`);
}

const perMinute = (row) => live.keys.line(row.id, "requests").slice(-60).reduce((sum, times) => sum + (times ?? 0), 0);

function requestsCell(row) {
  const text = `${number(perMinute(row))}/min`;
  return html`<span class="with-line">${text}<${Sparkline} values=${live.keys.line(row.id, "requests")} label=${`requests of ${row.name}, now ${text}`} /></span>`;
}

function Revoke({ row, readOnly, onDone }) {
  if (row.revoked) return html`<${Badge} kind="bad">revoked ${day(row.revoked)}<//>`;
  const revoke = async () => {
    await del(`/admin/keys/${encodeURIComponent(row.id)}`);
    await onDone();
  };
  return html`
    <${ActionButton} kind="danger" disabledReason=${readOnly} testid=${`revoke-${row.id}`} label=${`Revoke ${row.name}`} onRun=${revoke}
      confirm="Revoke it for good?">Revoke<//>`;
}
