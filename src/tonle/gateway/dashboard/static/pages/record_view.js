// An audit record as a tree that can be opened and closed, with what was redacted or masked marked, and its verify state.
//
// Does: show. Texts are plain text in the direction of their script. Does not: fetch.

import { sentence } from "../api.js";
import { html } from "../html.js";
import { Badge } from "../widgets.js";

export const REMOVED = "[redacted]";
const BUILT_IN_MASKS = ["email", "iban", "card", "ipv4", "ssn", "phone", "secret"];
const OPEN_UP_TO = 12; // entries of an object or a list that is shown open

// A pattern that finds the words that stand for what was removed; `masked` is the record's own count of them.
export function maskPattern(masked) {
  const named = Object.keys(masked ?? {}).filter((name) => !name.startsWith("omitted "));
  const names = [...new Set([...BUILT_IN_MASKS, ...named, "redacted"])];
  return new RegExp(`(\\[(?:${names.map((name) => name.replace(/[^\w-]/g, "\\$&")).join("|")})\\])`);
}

function Text({ text, pattern }) {
  const parts = text.split(pattern); // odd ones are masks
  return html`<span class="json-text" dir="auto">${parts.map((part, i) =>
    i % 2 ? html`<mark class="masked" title="Removed before or after it was recorded">${part}</mark>` : part)}</span>`;
}

function Scalar({ value, pattern }) {
  if (typeof value === "string") return html`<${Text} text=${value} pattern=${pattern} />`;
  return html`<span class="json-${value === null ? "null" : typeof value}">${String(value)}</span>`;
}

const isNested = (value) => typeof value === "object" && value !== null && Object.keys(value).length > 0;

function Entry({ name, value, pattern, isRedacted, depth }) {
  const label = html`<span class="json-name">${name}</span>
    ${isRedacted && html`<${Badge} kind="warning">redacted<//>`}`;
  if (!isNested(value)) {
    const shown = typeof value === "object" && value !== null ? (Array.isArray(value) ? "[]" : "{}") : null;
    return html`<div class="json-entry" data-field=${depth ? undefined : name}>${label}
      ${shown ?? html`<${Scalar} value=${value} pattern=${pattern} />`}</div>`;
  }
  const entries = Object.entries(value);
  const size = Array.isArray(value) ? `list of ${entries.length}` : `${entries.length} ${entries.length === 1 ? "field" : "fields"}`;
  return html`<details class="json-entry" open=${entries.length <= OPEN_UP_TO} data-field=${depth ? undefined : name}>
    <summary>${label} <span class="hint">${size}</span></summary>
    <div class="json-nested">${entries.map(([key, inner]) => html`
      <${Entry} key=${key} name=${key} value=${inner} pattern=${pattern} depth=${depth + 1} />`)}</div>
  </details>`;
}

// Fields without a value are left out, and counted.
export function RecordView({ record }) {
  const pattern = maskPattern(record.masked);
  const removed = new Set(Object.keys(record.chain?.redacted ?? {}));
  const entries = Object.entries(record);
  const shown = entries.filter(([name, value]) => value !== null || removed.has(name));
  const numEmpty = entries.length - shown.length;
  return html`<div class="json" data-testid="record">
    ${shown.map(([name, value]) => html`<${Entry} key=${name} name=${name} value=${value} pattern=${pattern} depth=${0}
      isRedacted=${removed.has(name) || value === REMOVED} />`)}
    ${numEmpty > 0 && html`<p class="hint">${numEmpty} ${numEmpty === 1 ? "field has" : "fields have"} no value.</p>`}
  </div>`;
}

const STATES = {
  verified: { kind: "good", text: "verified" },
  tampered: { kind: "bad", text: "tampered with" },
  "not verified": { kind: "warning", text: "not verified" },
  none: { kind: "info", text: "no record" },
};

// Whether a record's hash, chain and signature hold, with the reason.
export function VerifyState({ verified, detail }) {
  const { kind, text } = STATES[verified] ?? { kind: "warning", text: verified };
  return html`<p class="verify-state" data-testid="verified"><${Badge} kind=${kind}>${text}<//> ${sentence(detail ?? "")}</p>`;
}
