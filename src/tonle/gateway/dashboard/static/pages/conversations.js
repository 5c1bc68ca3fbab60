// The playground's state: one or two conversations and the fields they share. In memory only: a reload forgets them.
//
// Does: keep turns, send them, answer tool calls, stop. Does not: show anything.

import { bodyOf, NEW_FIELDS } from "./chat_request.js";
import { messageOfAnswer, newAnswer, stream } from "./chat_stream.js";

const REDRAW_MS = 50; // pieces that come faster than this are drawn together

// One conversation with one model. A turn is {role: "user", content}, {role: "assistant", answer} or {role: "tool", id, content}.
export class Conversation {
  #changed;
  #controller = null;

  constructor(changed) {
    this.#changed = changed;
    this.model = "";
    this.turns = [];
    this.results = {}; // typed for tool calls of the last answer: id -> text
  }

  get isBusy() {
    return this.#controller !== null;
  }

  // The last answer, if it is the last turn.
  get lastAnswer() {
    return this.turns.at(-1)?.answer ?? null;
  }

  // Calls of the last answer that wait for results.
  get openCalls() {
    return this.isBusy ? [] : (this.lastAnswer?.toolCalls ?? []);
  }

  // What the model is sent. A question whose answer failed before a word was said is left out with it.
  messages() {
    const found = [];
    for (const { role, answer, id, content } of this.turns) {
      if (role === "user") found.push({ role, content });
      else if (role === "tool") found.push({ role, tool_call_id: id, content });
      else if (!isEmpty(answer)) found.push(messageOfAnswer(answer));
      else if (answer.state !== "waiting") while (found.at(-1)?.role === "user") found.pop();
    }
    return found;
  }

  // The body that `draft` (may be empty) and the results of tool calls would be sent with.
  bodyWith(draft, fields) {
    const results = this.openCalls.map((call) => ({ role: "tool", tool_call_id: call.id, content: this.results[call.id] ?? "" }));
    const added = draft ? [...results, { role: "user", content: draft }] : results;
    return bodyOf(this.model, [...this.messages(), ...added], fields);
  }

  // Send a message, results of tool calls, or both.
  send(draft, fields) {
    const body = this.bodyWith(draft, fields);
    for (const call of this.openCalls) this.turns.push({ role: "tool", id: call.id, content: this.results[call.id] ?? "" });
    if (draft) this.turns.push({ role: "user", content: draft });
    this.results = {};
    return this.#ask(body, fields);
  }

  // Ask for the last answer once more.
  retry(fields) {
    if (this.lastAnswer) this.turns.pop();
    return this.#ask(bodyOf(this.model, this.messages(), fields), fields);
  }

  async #ask(body, fields) {
    const controller = (this.#controller = new AbortController());
    const answer = newAnswer();
    answer.wantsJson = Boolean(fields.schema.trim());
    answer.asked = body.model;
    this.turns.push({ role: "assistant", answer });
    this.#changed();
    await stream(body, answer, { signal: controller.signal, changed: this.#changed });
    if (this.#controller === controller) this.#controller = null;
    this.#changed();
  }

  stop() {
    this.#controller?.abort();
  }

  clear() {
    this.stop();
    this.#controller = null;
    this.turns = [];
    this.results = {};
    this.#changed();
  }
}

const isEmpty = (answer) => !answer.text && !answer.reasoning && !answer.toolCalls.length;

// What the page shows. Outlives the page, so that a look at another one loses nothing.
class Playground {
  #listeners = new Set();
  #timer = null;

  constructor() {
    const changed = () => this.changed();
    this.fields = { ...NEW_FIELDS };
    this.draft = "";
    this.isDouble = false;
    this.both = [new Conversation(changed), new Conversation(changed)];
  }

  get shown() {
    return this.isDouble ? this.both : this.both.slice(0, 1);
  }

  get isBusy() {
    return this.shown.some((conversation) => conversation.isBusy);
  }

  set(name, value) {
    this[name] = value;
    this.redraw();
  }

  setField(name, value) {
    this.fields = { ...this.fields, [name]: value };
    this.redraw();
  }

  // Tell the page soon.
  changed() {
    this.#timer ??= setTimeout(() => this.redraw(), REDRAW_MS);
  }

  redraw() {
    clearTimeout(this.#timer);
    this.#timer = null;
    for (const callback of this.#listeners) callback();
  }

  listen(callback) {
    this.#listeners.add(callback);
    return () => this.#listeners.delete(callback);
  }

  // Models that are gone are replaced by the first there is.
  useModels(names) {
    this.both.forEach((conversation, i) => {
      if (!names.includes(conversation.model)) conversation.model = names[Math.min(i, names.length - 1)] ?? "";
    });
    this.redraw();
  }
}

export const playground = new Playground();
