// The page "playground": a conversation with any model or adapter, or with two side by side.

import { get } from "../api.js";
import { html, useEffect, useRef, useState } from "../html.js";
import { inWords, Message, PageHeading } from "../widgets.js";
import { problemsOf } from "./chat_request.js";
import { playground } from "./conversations.js";
import { Code } from "./playground_code.js";
import { Controls } from "./playground_controls.js";
import { Pane } from "./playground_pane.js";

// Draws again whenever the conversations change.
function usePlayground() {
  const [, update] = useState(0);
  useEffect(() => playground.listen(() => update((times) => times + 1)), []);
  return playground;
}

// The models this key may use, without worker pools (`kind`), which do not chat: {models, error}.
function useModels(isAllowed) {
  const [state, setState] = useState({ models: null, error: "" });
  useEffect(() => {
    if (!isAllowed) return;
    get("/v1/models").then(
      ({ data }) => {
        const models = data.filter((model) => !model.kind);
        playground.useModels(models.map((model) => model.id));
        setState({ models, error: "" });
      },
      (problem) => setState({ models: [], error: inWords(problem) }),
    );
  }, [isAllowed]);
  return state;
}

export const title = "Playground";

export default function PlaygroundPage({ session }) {
  const isAllowed = Boolean(session.can_use_models);
  const { models, error } = useModels(isAllowed);
  return html`<${PageHeading} title=${title} />
    ${!isAllowed && html`<${Disabled} session=${session} />`}
    ${error && html`<${Message} kind="bad">${error}<//>`}
    ${isAllowed && !models && html`<p class="hint">Loading the list of models …</p>`}
    ${models && !error && !models.length && html`<${Message}>There is no model that this key may use.<//>`}
    ${models?.length > 0 && html`<${Workbench} session=${session} models=${models} />`}`;
}

function Workbench({ session, models }) {
  const state = usePlayground();
  const problems = problemsOf(state.fields);
  const isBlocked = Object.keys(problems).length > 0;
  return html`<div class="playground" data-testid="playground">
    <div class="playground-main">
      <div class=${`panes${state.isDouble ? " two" : ""}`}>
        ${state.shown.map((conversation, i) => html`<${Pane} key=${i} number=${i} conversation=${conversation}
          models=${models} fields=${state.fields} isSingle=${!state.isDouble} isBlocked=${isBlocked} />`)}
      </div>
      <${Composer} state=${state} problems=${problems} />
      <${Code} state=${state} needsKey=${Boolean(session.key)} isBlocked=${isBlocked} />
    </div>
    <aside class="playground-side card" aria-label="Settings of the request">
      <${Controls} state=${state} problems=${problems} />
    </aside>
  </div>`;
}

function Disabled({ session }) {
  const name = session.key?.name || session.key?.id || "this key";
  return html`<section class="card" data-testid="playground-disabled">
    <h2>The playground needs a key that may use models</h2>
    <p>You are signed in with <b>${name}</b>, which may look at the dashboard but not send requests to models. Sign in with a key that has
      the scope <code>models</code> as well as <code>dashboard</code>, or with an admin's. Admins create keys on the
      page${" "}<a href="#/keys">Keys</a>.</p>
  </section>`;
}

function Composer({ state, problems }) {
  const field = useRef(null);
  const found = Object.values(problems);
  const canSend = !state.isBusy && !found.length && state.draft.trim() !== "";
  const submit = (event) => {
    event.preventDefault();
    if (!canSend) return;
    const draft = state.draft;
    state.set("draft", "");
    for (const conversation of state.shown) conversation.send(draft, state.fields);
    field.current?.focus();
  };
  const onKeyDown = (event) => {
    // While an input method composes a letter, Enter ends the letter.
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
    if (event.key === "Escape" && state.isBusy) stop();
  };
  const stop = () => state.shown.forEach((conversation) => conversation.stop());
  return html`<form class="composer" onSubmit=${submit}>
    <label class="unseen" for="draft">Message</label>
    <textarea id="draft" ref=${field} dir="auto" rows="3" data-testid="draft" value=${state.draft}
      placeholder=${state.isDouble ? "Message to both models" : "Message"}
      onInput=${(event) => state.set("draft", event.target.value)} onKeyDown=${onKeyDown} />
    <div class="composer-actions">
      ${state.isBusy
        ? html`<button type="button" data-testid="stop" onClick=${stop}>Stop</button>`
        : html`<button type="submit" class="primary" data-testid="send" disabled=${!canSend}>
            ${state.isDouble ? "Send to both" : "Send"}</button>`}
      <button type="button" data-testid="clear"
        disabled=${!state.shown.some((conversation) => conversation.turns.length)}
        onClick=${() => state.shown.forEach((conversation) => conversation.clear())}>Clear</button>
      <label class="check"><input type="checkbox" checked=${state.isDouble} disabled=${state.isBusy} data-testid="double"
        onChange=${(event) => state.set("isDouble", event.target.checked)} /> Two side by side</label>
      <span class="hint composer-hint">Enter sends, Shift+Enter begins a new line.</span>
    </div>
    ${found.length > 0 && html`<p class="problem" role="alert">${found[0]}</p>`}
  </form>`;
}
