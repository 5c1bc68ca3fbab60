// The page that asks for a key. The key is sent once and exchanged for a cookie that scripts cannot read.

import { post } from "./api.js";
import { html, useState } from "./html.js";
import { inWords, Message } from "./widgets.js";

export function Login({ onDone }) {
  const [key, setKey] = useState("");
  const [error, setError] = useState(null);
  const [isBusy, setBusy] = useState(false);
  const login = async (event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      await post("/dashboard/api/login", { key: key.trim() });
      await onDone();
    } catch (problem) {
      setError(inWords(problem));
    }
    setBusy(false);
  };
  return html`
    <main class="alone">
      <form class="login card" onSubmit=${login} data-testid="login">
        <h1><img src="/dashboard/static/icon.svg" alt="" width="28" height="28" /> Tonle</h1>
        <p id="login-help">Sign in with a key of scope <code>admin</code>, or <code>dashboard</code> to read only.</p>
        <label for="login-key">Key</label>
        <input id="login-key" type="password" autocomplete="current-password" spellcheck="false" required autofocus
          aria-describedby="login-help" value=${key} onInput=${(event) => setKey(event.currentTarget.value)} data-testid="login-key" />
        ${error && html`<${Message} kind="bad" testid="login-error">${error}<//>`}
        <button type="submit" class="primary" aria-busy=${isBusy} disabled=${isBusy} data-testid="login-submit">Sign in</button>
        <p class="hint">Make one on the server: <code>tonle keys create --name NAME --scope dashboard</code></p>
      </form>
    </main>`;
}
