// The request of the playground as a curl command or a Python program.

import { html, useState } from "../html.js";
import { CopyButton } from "../widgets.js";
import { asCurl, asPython } from "./chat_request.js";

const KINDS = [["curl", "curl", asCurl], ["python", "Python", asPython]];

export function Code({ state, needsKey, isBlocked }) {
  const [kind, setKind] = useState("curl");
  const [isOpen, setIsOpen] = useState(false);
  const make = KINDS.find(([id]) => id === kind)[2];
  return html`<details class="fold playground-code" open=${isOpen} onToggle=${(event) => setIsOpen(event.currentTarget.open)} data-testid="code">
    <summary>As curl or Python</summary>
    ${isOpen && (isBlocked
      ? html`<p class="problem">Correct the settings first.</p>`
      : html`
        <div class="choices" role="group" aria-label="Language">
          ${KINDS.map(([id, name]) => html`<button key=${id} type="button" aria-pressed=${kind === id ? "true" : "false"}
            data-testid=${`code-${id}`} onClick=${() => setKind(id)}>${name}</button>`)}
        </div>
        ${state.shown.map((conversation, i) => html`<${Sample} key=${i} conversation=${conversation} state=${state}
          make=${make} needsKey=${needsKey} />`)}
        ${needsKey && html`<p class="hint">Put a key into the variable <code>TONLE_API_KEY</code> first. Yours is not shown here.</p>`}`)}
  </details>`;
}

function Sample({ conversation, state, make, needsKey }) {
  const body = conversation.bodyWith(state.draft.trim() ? state.draft : "", state.fields);
  const isQuestion = ["user", "tool"].includes(body.messages.at(-1)?.role);
  if (!isQuestion) body.messages.push({ role: "user", content: "Hello" });
  const text = make(body, window.location.origin, needsKey);
  return html`<div class="code-sample">
    <pre tabindex="0" data-testid="code-text">${text}</pre>
    <${CopyButton} text=${text} testid="code-copy" />
  </div>`;
}
