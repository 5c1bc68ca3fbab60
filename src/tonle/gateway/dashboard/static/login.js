// The page that asks for a key. The key is sent once and exchanged for a cookie that scripts cannot read.

import { post } from "./api.js";
import { html, useState } from "./html.js";
import { inWords, Message } from "./widgets.js";

// Why a session has ended, by the server's word. `elsewhere`: the browser had its cookie no more.
const ENDED = {
  revoked: "the key you used was revoked.",
  expired: "a session ends 12 hours after it was last used, and 7 days after it began.",
  crowded: "there were too many sessions, and yours had not been used for longest.",
  unknown: "the server was restarted, or this browser signed in to another server at the same host name.",
  elsewhere: "in another tab, or because 7 days had passed.",
};

// `ended`: of the session before, if there was one.
export function Login({ ended, onDone }) {
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
        ${ENDED[ended] && !error && html`<${Message} testid="login-ended">You were signed out: ${ENDED[ended]}<//>`}
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
