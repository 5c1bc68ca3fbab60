// The form that creates a key, and the secret it gives, which is shown once and never again.

import { post } from "../api.js";
import { html, useState } from "../html.js";
import { CopyButton, inWords, Message } from "../widgets.js";

const SCOPES = {
  models: "use models",
  metrics: "read /metrics",
  priority: "ask for more than normal priority",
  gateway: "ask for the callers of another gateway",
  dashboard: "read this dashboard",
  admin: "everything, also manage the server",
};
const LIMITS = {
  requests_per_minute: "Requests per minute", tokens_per_minute: "Tokens per minute",
  max_concurrent: "Concurrent requests", tokens_per_day: "Tokens per day",
  audio_seconds_per_minute: "Seconds of sound per minute", images_per_minute: "Images per minute",
};
const EMPTY = { name: "", scopes: ["models"], models: "", tenant: "", limits: {} };

export function CreateKey({ models, onDone }) {
  const [fields, setFields] = useState(EMPTY);
  const [isBusy, setBusy] = useState(false);
  const [made, setMade] = useState(null); // the answer with the secret
  const [error, setError] = useState(null);
  const [isOpen, setOpen] = useState(false);
  const set = (change) => setFields((before) => ({ ...before, ...change }));
  const create = async (event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    setMade(null);
    try {
      setMade(await post("/admin/keys", bodyOf(fields)));
      setFields(EMPTY);
      setOpen(false);
      await onDone();
    } catch (problem) {
      setError(inWords(problem));
    }
    setBusy(false);
  };
  return html`
    <details class="card create" data-testid="create-key" open=${isOpen} onToggle=${(event) => setOpen(event.currentTarget.open)}>
      <summary>Create a key</summary>
      <form onSubmit=${create}>
        <fieldset disabled=${isBusy}>
          <legend class="unseen">New key</legend>
          <div class="fields">
            <div class="field"><label for="key-name">Who or what it is for</label>
              <input id="key-name" required value=${fields.name} onInput=${(event) => set({ name: event.currentTarget.value })} data-testid="key-name" /></div>
            <div class="field"><label for="key-models">Models it may use</label>
              <input id="key-models" list="key-model-names" placeholder="all, or: name, name" value=${fields.models}
                onInput=${(event) => set({ models: event.currentTarget.value })} />
              <datalist id="key-model-names">${(models ?? []).map((name) => html`<option key=${name} value=${name}></option>`)}</datalist></div>
            <div class="field"><label for="key-tenant">Tenant (keys of one share cached answers)</label>
              <input id="key-tenant" placeholder="none" value=${fields.tenant} onInput=${(event) => set({ tenant: event.currentTarget.value })} /></div>
          </div>
          <${Scopes} chosen=${fields.scopes} onChange=${(scopes) => set({ scopes })} />
          <div class="fields">
            ${Object.entries(LIMITS).map(([name, words]) => html`
              <div class="field" key=${name}><label for=${`key-${name}`}>${words}</label>
                <input id=${`key-${name}`} type="number" min="1" step="1" placeholder="the server's" value=${fields.limits[name] ?? ""}
                  onInput=${(event) => set({ limits: { ...fields.limits, [name]: event.currentTarget.value } })} /></div>`)}
          </div>
          <button type="submit" class="primary" aria-busy=${isBusy} data-testid="key-create">Create</button>
        </fieldset>
      </form>
      ${error && html`<${Message} kind="bad" testid="key-error">${error}<//>`}
    </details>
    ${made && html`<${Secret} made=${made} onClose=${() => setMade(null)} />`}`;
}

function Scopes({ chosen, onChange }) {
  const toggle = (scope) => onChange(chosen.includes(scope) ? chosen.filter((one) => one !== scope) : [...chosen, scope]);
  return html`
    <fieldset class="checks">
      <legend>It may</legend>
      ${Object.entries(SCOPES).map(([scope, words]) => html`
        <label class="check" key=${scope}>
          <input type="checkbox" checked=${chosen.includes(scope)} onChange=${() => toggle(scope)} data-testid=${`scope-${scope}`} /> ${words} <span class="soft">(${scope})</span>
        </label>`)}
    </fieldset>`;
}

function Secret({ made, onClose }) {
  return html`
    <section class="card secret-card" data-testid="key-made">
      <h2>The key “${made.name}”</h2>
      <p role="status">Copy it now: it is shown only this once, and the server keeps no copy.</p>
      <div class="secret">
        <code data-testid="key-secret">${made.key}</code>
        <${CopyButton} text=${made.key} testid="key-copy" />
        <button type="button" onClick=${onClose}>I have it</button>
      </div>
    </section>`;
}

export function bodyOf({ name, scopes, models, tenant, limits }) {
  const numbers = Object.entries(limits).filter(([, value]) => value !== "").map(([limit, value]) => [limit, Number(value)]);
  return {
    name: name.trim(), scopes, tenant: tenant.trim(),
    models: models.split(",").map((model) => model.trim()).filter(Boolean),
    ...Object.fromEntries(numbers),
  };
}
