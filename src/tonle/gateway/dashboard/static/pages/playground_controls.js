// The playground's settings: system prompt, sampling, tools, the schema of the answer. Both conversations use them.

import { html, useId } from "../html.js";
import { NEW_FIELDS, NUMBERS, schemaOf, toolsOf } from "./chat_request.js";

const TOOLS_EXAMPLE = JSON.stringify([{
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather in a city, now.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}], null, 2);

const SCHEMA_EXAMPLE = JSON.stringify({
  type: "object",
  properties: { city: { type: "string" }, population: { type: "integer" } },
  required: ["city", "population"],
}, null, 2);

export function Controls({ state, problems }) {
  const { fields } = state;
  const set = (name) => (event) => state.setField(name, event.target.value);
  const isChanged = Object.keys(NEW_FIELDS).some((name) => fields[name] !== NEW_FIELDS[name]);
  return html`<div class="controls" data-testid="controls">
    <${Area} label="System prompt" name="system" value=${fields.system} onInput=${set("system")} rows=${3}
      placeholder="What the model is told before the conversation" />
    <fieldset class="sampling">
      <legend>Sampling</legend>
      <div class="sampling-grid">
        ${NUMBERS.map((number) => html`<${NumberField} key=${number.name} number=${number} value=${fields[number.name]}
          problem=${problems[number.name]} onInput=${set(number.name)} />`)}
      </div>
      <p class="hint">Empty fields are left to the server.</p>
      <${Area} label="Stop at" name="stop" value=${fields.stop} onInput=${set("stop")} rows=${2}
        placeholder="One text per line" />
    </fieldset>
    <details class="fold" open=${Boolean(fields.tools)}>
      <summary>Tools ${fields.tools.trim() && html`<span class="hint">${summary(toolsOf(fields.tools).tools)}</span>`}</summary>
      <${JsonArea} label="Tools (JSON)" name="tools" value=${fields.tools} problem=${problems.tools} state=${state} example=${TOOLS_EXAMPLE} />
      ${fields.tools.trim() && html`<label class="field"><span>Use them</span>
        <select value=${fields.tool_choice} data-testid="tool-choice" onChange=${set("tool_choice")}>
          <option value="auto">when the model wants to</option>
          <option value="required">always</option>
          <option value="none">never</option>
        </select></label>`}
    </details>
    <details class="fold" open=${Boolean(fields.schema)}>
      <summary>JSON schema ${fields.schema.trim() && !problems.schema && html`<span class="hint">${formatName(fields.schema)}</span>`}</summary>
      <${JsonArea} label="Schema of the answer (JSON)" name="schema" value=${fields.schema} problem=${problems.schema} state=${state}
        example=${SCHEMA_EXAMPLE} />
    </details>
    ${isChanged && html`<button type="button" data-testid="reset" onClick=${() => state.set("fields", { ...NEW_FIELDS })}>
      Reset settings</button>`}
  </div>`;
}

const summary = (tools) => (tools ? tools.map((tool) => tool.function.name).join(", ") : "");
const formatName = (text) => (schemaOf(text).format?.type === "json_object" ? "any JSON object" : "enforced");

function NumberField({ number, value, problem, onInput }) {
  const id = useId();
  return html`<label class="field"><span>${number.label}</span>
    <input type="text" inputmode=${number.whole ? "numeric" : "decimal"} autocomplete="off" data-testid=${`field-${number.name}`}
      value=${value} placeholder="default" onInput=${onInput} aria-invalid=${problem ? "true" : "false"}
      aria-describedby=${problem ? id : null} />
    ${problem && html`<span class="problem" id=${id}>${problem}</span>`}</label>`;
}

function Area({ label, name, value, onInput, rows, placeholder }) {
  return html`<label class="field"><span>${label}</span>
    <textarea dir="auto" rows=${rows} value=${value} placeholder=${placeholder} data-testid=${`field-${name}`} onInput=${onInput} /></label>`;
}

function JsonArea({ label, name, value, problem, state, example }) {
  const id = useId();
  const set = (text) => state.setField(name, text);
  return html`<label class="field"><span>${label}</span>
    <textarea class="code" rows="8" spellcheck="false" autocapitalize="off" value=${value} data-testid=${`field-${name}`}
      aria-invalid=${problem ? "true" : "false"} aria-describedby=${problem ? id : null}
      onInput=${(event) => set(event.target.value)} />
    ${problem && html`<span class="problem" id=${id} data-testid=${`problem-${name}`}>${problem}</span>`}</label>
    <div class="json-actions">
      ${!value.trim() && html`<button type="button" onClick=${() => set(example)}>Insert an example</button>`}
      ${value.trim() && !problem && html`<button type="button" onClick=${() => set(JSON.stringify(JSON.parse(value), null, 2))}>Format</button>`}
      ${value.trim() && html`<button type="button" onClick=${() => set("")}>Remove</button>`}
    </div>`;
}
