// One conversation of the playground: the model, what was said, figures of each answer, and fields for results of tools.

import { count, number, seconds } from "../format.js";
import { html, useEffect, useRef, useState } from "../html.js";
import { Badge, Message } from "../widgets.js";
import { figuresOf } from "./chat_stream.js";

const NEAR_END_PX = 60; // a reader this close to the end is kept there while text comes

export function Pane({ number: index, conversation, models, fields, isSingle, isBlocked }) {
  const log = useRef(null);
  const follow = useRef(true);
  useEffect(() => {
    const element = log.current;
    if (element && follow.current) element.scrollTop = element.scrollHeight;
  });
  const onScroll = ({ target }) => {
    follow.current = target.scrollHeight - target.scrollTop - target.clientHeight < NEAR_END_PX;
  };
  const label = isSingle ? "Conversation" : `Conversation ${index + 1}`;
  const last = conversation.turns.length - 1;
  return html`<section class="pane" aria-label=${label} data-testid="pane">
    <div class="pane-head">
      <${ModelPicker} id=${`model-${index}`} label=${isSingle ? "Model" : `Model ${index + 1}`} models=${models}
        conversation=${conversation} />
    </div>
    <div class="pane-log" ref=${log} onScroll=${onScroll} role="log" tabindex="0" aria-label=${label}
      aria-busy=${conversation.isBusy ? "true" : "false"}>
      ${!conversation.turns.length && html`<p class="hint pane-empty">Nothing was said yet. Conversations are kept in this page
        alone: they are gone when it is closed or loaded again.</p>`}
      ${conversation.turns.map((turn, i) => html`<${Turn} key=${i} turn=${turn} isLast=${i === last}
        conversation=${conversation} fields=${fields} isBlocked=${isBlocked} />`)}
    </div>
  </section>`;
}

function ModelPicker({ id, label, models, conversation }) {
  const [, update] = useState(0);
  const groups = [
    ["Models", models.filter((model) => !model.parent)],
    ["Adapters", models.filter((model) => model.parent)],
  ].filter(([, group]) => group.length);
  const options = (group) => group.map((model) => html`
    <option key=${model.id} value=${model.id}>${model.parent ? `${model.id} (on ${model.parent})` : model.id}</option>`);
  const choose = (event) => {
    conversation.model = event.target.value;
    update((times) => times + 1);
  };
  return html`<label class="field pane-model" for=${id}><span>${label}</span>
    <select id=${id} data-testid="model" value=${conversation.model} disabled=${conversation.isBusy} onChange=${choose}>
      ${groups.length > 1
        ? groups.map(([name, group]) => html`<optgroup key=${name} label=${name}>${options(group)}</optgroup>`)
        : options(models)}
    </select></label>`;
}

function Turn({ turn, ...rest }) {
  if (turn.role === "assistant") {
    return html`<${Answer} answer=${turn.answer} ...${rest} />`;
  }
  const name = turn.role === "tool" ? "Result of a tool" : "You";
  return html`<article class="turn turn-${turn.role}" data-testid="turn-${turn.role}">
    <h3 class="turn-name">${name}</h3>
    <div class="turn-text" dir="auto">${turn.content || html`<span class="hint">empty</span>`}</div>
  </article>`;
}

function Answer({ answer, isLast, conversation, fields, isBlocked }) {
  const isOpen = answer.state === "waiting" || answer.state === "streaming";
  return html`<article class="turn turn-assistant" data-testid="answer" data-state=${answer.state}>
    <h3 class="turn-name">${answer.model ?? answer.asked}</h3>
    ${answer.reasoning && html`<details class="reasoning" open=${isOpen && !answer.text} data-testid="reasoning">
      <summary>Reasoning</summary><div class="turn-text" dir="auto">${answer.reasoning}</div></details>`}
    <${AnswerText} answer=${answer} isOpen=${isOpen} />
    ${answer.toolCalls.map((call, i) => html`<${ToolCall} key=${i} call=${call} />`)}
    ${answer.state === "failed" && html`<${Message} kind="bad" testid="answer-error">${answer.error}<//>`}
    ${answer.state === "stopped" && html`<p class="hint">Stopped.</p>`}
    <${Figures} answer=${answer} isOpen=${isOpen} />
    ${isLast && !isOpen && answer.toolCalls.length > 0 && html`<${Results} conversation=${conversation} fields=${fields} isBlocked=${isBlocked} />`}
    ${isLast && !isOpen && html`<div class="turn-actions">
      <button type="button" data-testid="retry" disabled=${isBlocked} onClick=${() => conversation.retry(fields)}>
        ${answer.state === "failed" ? "Try again" : "Answer again"}</button></div>`}
  </article>`;
}

function AnswerText({ answer, isOpen }) {
  if (!answer.text) {
    return isOpen && !answer.reasoning ? html`<p class="hint waiting" data-testid="waiting">Waiting for the first token …</p>` : null;
  }
  const pretty = answer.wantsJson && !isOpen ? prettyJson(answer.text) : null;
  if (pretty) return html`<pre class="turn-json" dir="auto" data-testid="answer-json">${pretty}</pre>`;
  return html`<div class="turn-text" dir="auto" data-testid="answer-text">${answer.text}</div>
    ${answer.wantsJson && answer.state === "done" && html`<p class="problem">This is not valid JSON${answer.finish === "length"
      ? ": it was cut off at the maximum number of tokens." : "."}</p>`}`;
}

function prettyJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return null;
  }
}

function ToolCall({ call }) {
  return html`<div class="tool-call" data-testid="tool-call">
    <${Badge}>calls<//> <code>${call.name}</code>
    <pre class="turn-json" dir="auto">${prettyJson(call.arguments) ?? call.arguments}</pre>
  </div>`;
}

// One field per call of the last answer. What is typed is kept by the conversation, because the composer sends it, too.
function Results({ conversation, fields, isBlocked }) {
  const [, update] = useState(0);
  const { results } = conversation;
  const set = (id, value) => {
    results[id] = value;
    update((times) => times + 1);
  };
  const submit = (event) => {
    event.preventDefault();
    conversation.send("", fields);
  };
  return html`<form class="tool-results" onSubmit=${submit}>
    ${conversation.openCalls.map((call) => html`<label key=${call.id} class="field">
      <span>What <code>${call.name}</code> returns</span>
      <textarea rows="2" dir="auto" data-testid="tool-result" placeholder='such as {"ok": true}' value=${results[call.id] ?? ""}
        onInput=${(event) => set(call.id, event.target.value)} /></label>`)}
    <button type="submit" class="primary" data-testid="send-results" disabled=${isBlocked}>Send results</button>
  </form>`;
}

function Figures({ answer, isOpen }) {
  const figures = figuresOf(answer);
  const entries = [
    ["time to first token", "ttft", figures.ttft_s === null ? null : seconds(figures.ttft_s)],
    ["tokens/s", "speed", figures.tokens_per_s === null ? null : `${figures.is_estimate ? "≈ " : ""}${number(figures.tokens_per_s)}`],
    ["total", "total", isOpen || figures.total_s === null ? null : seconds(figures.total_s)],
    ["prompt", "prompt", figures.prompt_tokens === null ? null : promptText(figures)],
    ["answer", "completion", figures.completion_tokens === null ? null : `${count(figures.completion_tokens)} tokens`],
    ["ended by", "finish", answer.finish],
  ].filter(([, , text]) => text !== null);
  if (!entries.length && !answer.requestId) return null;
  return html`<dl class="figures" data-testid="figures">
    ${entries.map(([name, id, text]) => html`<div key=${id}><dt>${name}</dt><dd data-testid=${`figure-${id}`}>${text}</dd></div>`)}
    ${answer.requestId && !isOpen && html`<div><dt>request</dt><dd>
      <a href=${`#/requests/${encodeURIComponent(answer.requestId)}`} data-testid="explain-link">where its time went</a></dd></div>`}
  </dl>`;
}

function promptText({ prompt_tokens: prompt, cached_tokens: cached }) {
  const text = `${count(prompt)} tokens`;
  return cached ? `${text}, ${count(cached)} cached` : text;
}
