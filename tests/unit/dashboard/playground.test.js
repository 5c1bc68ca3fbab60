// The playground: streams cut anywhere, answers put together, requests and the code that makes them, conversations.

import assert from "node:assert/strict";
import { test } from "node:test";

import { asCurl, asPython, bodyOf, NEW_FIELDS, problemsOf, pythonOf, schemaOf, toolsOf } from "./static/pages/chat_request.js";
import { addEvent, figuresOf, messageOfAnswer, newAnswer, stream } from "./static/pages/chat_stream.js";
import { Conversation } from "./static/pages/conversations.js";
import { EventParser } from "./static/pages/event_parser.js";

const encode = (text) => new TextEncoder().encode(text);
const fields = (changed) => ({ ...NEW_FIELDS, max_tokens: "", ...changed });

// Answers of a server, one after the other; `asked` are the bodies that it got.
function serve(...replies) {
  const asked = [];
  globalThis.fetch = async (path, { body, signal }) => {
    asked.push(JSON.parse(body));
    return replies.shift()(signal);
  };
  return asked;
}

const chunk = (delta, more = {}) => `data: ${JSON.stringify({ id: "c", model: "m", choices: [{ index: 0, delta, ...more }] })}\n\n`;
const DONE = "data: [DONE]\n\n";

// A reply whose bytes come `size` at a time.
function streamed(text, { size = 7, headers = { "x-request-id": "req-1" } } = {}) {
  const bytes = encode(text);
  return () => new Response(new ReadableStream({
    start(controller) {
      for (let at = 0; at < bytes.length; at += size) controller.enqueue(bytes.slice(at, at + size));
      controller.close();
    },
  }), { headers });
}

test("events are the same wherever their bytes are cut", () => {
  for (const end of ["\n", "\r\n", "\r"]) {
    const lines = [": hello", 'data: {"a":"សួស្តី 👋"}', "", "event: x", "data: 1", "data:2", "", "data: [DONE]", ""];
    const bytes = encode(lines.join(end) + end);
    for (let size = 1; size <= bytes.length; size += 1) {
      const parser = new EventParser();
      const found = [];
      for (let at = 0; at < bytes.length; at += size) found.push(...parser.push(bytes.slice(at, at + size)));
      found.push(...parser.end());
      assert.deepEqual(found, [
        { event: "message", data: '{"a":"សួស្តី 👋"}' }, { event: "x", data: "1\n2" }, { event: "message", data: "[DONE]" },
      ], `${JSON.stringify(end)}, ${size} bytes at a time`);
    }
  }
});

test("an empty line after a CR that ended a piece still ends the event", () => {
  const parser = new EventParser();
  assert.deepEqual(parser.push(encode("data: 1\r")), []);
  assert.deepEqual(parser.push(encode("\n")), []);
  assert.deepEqual(parser.push(encode("\n")), [{ event: "message", data: "1" }]);
});

test("an event without its empty line counts at the end", () => {
  const parser = new EventParser();
  assert.deepEqual(parser.push(encode("data: 1")), []);
  assert.deepEqual(parser.end(), [{ event: "message", data: "1" }]);
});

test("an answer is put together from its pieces", async () => {
  const usage = { prompt_tokens: 9, completion_tokens: 3, prompt_tokens_details: { cached_tokens: 4 } };
  serve(streamed(
    chunk({ role: "assistant", content: "" }) + chunk({ reasoning_content: "hm" }) + chunk({ content: "ភ្នំ" }) + chunk({ content: "ពេញ" }) +
    chunk({}, { finish_reason: "stop" }) + `data: ${JSON.stringify({ choices: [], usage })}\n\n` + DONE, { size: 1 }));
  const answer = await stream({ model: "m", messages: [] }, newAnswer(), {});
  assert.deepEqual([answer.state, answer.text, answer.reasoning, answer.finish, answer.requestId], ["done", "ភ្នំពេញ", "hm", "stop", "req-1"]);
  const figures = figuresOf(answer);
  assert.deepEqual([figures.prompt_tokens, figures.cached_tokens, figures.completion_tokens, figures.is_estimate], [9, 4, 3, false]);
  assert.ok(figures.ttft_s >= 0 && figures.total_s >= figures.ttft_s);
});

test("tool calls come in pieces, several at a time", () => {
  const answer = newAnswer();
  const call = (index, more) => JSON.stringify({ choices: [{ delta: { tool_calls: [{ index, ...more }] } }] });
  addEvent(answer, call(0, { id: "call-1", function: { name: "add", arguments: "" } }));
  addEvent(answer, call(1, { id: "call-2", function: { name: "time", arguments: "{}" } }));
  addEvent(answer, call(0, { function: { arguments: '{"a":' } }));
  addEvent(answer, call(0, { function: { arguments: "1}" } }));
  assert.deepEqual(answer.toolCalls, [{ id: "call-1", name: "add", arguments: '{"a":1}' }, { id: "call-2", name: "time", arguments: "{}" }]);
  assert.deepEqual(messageOfAnswer(answer), {
    role: "assistant", content: null, tool_calls: [
      { id: "call-1", type: "function", function: { name: "add", arguments: '{"a":1}' } },
      { id: "call-2", type: "function", function: { name: "time", arguments: "{}" } },
    ],
  });
});

test("what goes wrong is said in words", async () => {
  serve(
    () => new Response('{"error": {"message": "there is no model \'x\'"}}', { status: 404 }),
    streamed(chunk({ content: "a" }) + 'data: {"error": {"message": "the engine died"}}\n\n' + DONE),
    streamed(chunk({ content: "half" })),
    () => Promise.reject(new TypeError("Failed to fetch")),
  );
  const results = [];
  for (let i = 0; i < 4; i += 1) results.push(await stream({}, newAnswer(), {}));
  assert.deepEqual(results.map((answer) => answer.state), ["failed", "failed", "failed", "failed"]);
  assert.match(results[0].error, /There is no model 'x'\./);
  assert.match(results[1].error, /the engine died/i);
  assert.match(results[2].error, /broke off/);
  assert.equal(results[2].text, "half");
  assert.match(results[3].error, /cannot be reached/);
});

test("an answer can be stopped, and keeps what came", async () => {
  const controller = new AbortController();
  serve((signal) => new Response(new ReadableStream({
    start(bytes) {
      bytes.enqueue(encode(chunk({ content: "so far" })));
      signal.addEventListener("abort", () => bytes.error(new DOMException("stopped", "AbortError")));
    },
  })));
  const answer = newAnswer();
  await stream({}, answer, { signal: controller.signal, changed: () => answer.text && controller.abort() });
  assert.deepEqual([answer.state, answer.text, answer.error], ["stopped", "so far", null]);
});

test("empty fields are left to the server", () => {
  assert.deepEqual(bodyOf("m", [{ role: "user", content: "hi" }], fields({})), { model: "m", messages: [{ role: "user", content: "hi" }] });
  const body = bodyOf("m", [], fields({ system: "Be brief.", temperature: "0", seed: "7", stop: "a b\n\n###" }));
  assert.deepEqual(body, { model: "m", messages: [{ role: "system", content: "Be brief." }], temperature: 0, seed: 7, stop: ["a b", "###"] });
});

test("fields that cannot be are refused before they are sent", () => {
  assert.deepEqual(problemsOf(fields({})), {});
  const problems = problemsOf(fields({ temperature: "3", top_p: "x", max_tokens: "1.5", tools: "[", schema: "[]" }));
  assert.deepEqual(Object.keys(problems), ["temperature", "top_p", "max_tokens", "tools", "schema"]);
  assert.match(problems.temperature, /2 or less/);
  assert.match(problems.tools, /not JSON/);
});

test("tools may be one, a bare function, or a list", () => {
  const add = { name: "add", parameters: { type: "object" } };
  const tool = { type: "function", function: add };
  for (const given of [tool, add, [tool], [add]]) assert.deepEqual(toolsOf(JSON.stringify(given)), { tools: [tool] });
  assert.deepEqual(toolsOf(" "), { tools: null });
  assert.match(toolsOf('{"type": "function", "function": {"name": "no spaces"}}').problem, /Tool 1: "name"/);
});

test("a bare schema is wrapped, a response format is taken as it is", () => {
  const schema = { type: "object", title: "City" };
  assert.deepEqual(schemaOf(JSON.stringify(schema)).format, { type: "json_schema", json_schema: { name: "City", schema } });
  assert.deepEqual(schemaOf('{"type": "json_object"}').format, { type: "json_object" });
  assert.match(schemaOf('{"type": "json_schema"}').problem, /"schema"/);
});

test("code quotes whatever was typed, and never has a key in it", () => {
  const body = bodyOf("m", [{ role: "user", content: "it's\n\"ភ្នំពេញ\" \\ $HOME" }], fields({ temperature: "0.5" }));
  const curl = asCurl(body, "http://127.0.0.1:8000", true);
  assert.ok(curl.includes("it'\\''s") && curl.includes("Bearer $TONLE_API_KEY"));
  assert.ok(!asCurl(body, "http://127.0.0.1:8000", false).includes("Authorization"));
  const python = asPython(body, "http://127.0.0.1:8000", true);
  assert.ok(python.includes('base_url="http://127.0.0.1:8000/v1"') && python.includes('os.environ["TONLE_API_KEY"]'));
  assert.ok(python.includes('temperature=0.5') && python.includes("ភ្នំពេញ"));
  assert.equal(pythonOf({ a: [true, false, null, 1.5, "x"] }), '{"a": [True, False, None, 1.5, "x"]}');
});

test("a conversation sends what was said, and the results of tools", async () => {
  const call = { index: 0, id: "call-1", function: { name: "add", arguments: "{}" } };
  const asked = serve(
    streamed(chunk({ tool_calls: [call] }) + chunk({}, { finish_reason: "tool_calls" }) + DONE),
    streamed(chunk({ content: "3" }) + chunk({}, { finish_reason: "stop" }) + DONE),
    streamed(chunk({ content: "4" }) + chunk({}, { finish_reason: "stop" }) + DONE),
  );
  const conversation = new Conversation(() => {});
  conversation.model = "m";
  await conversation.send("1 + 2?", fields({}));
  assert.deepEqual(conversation.openCalls.map(({ id }) => id), ["call-1"]);
  conversation.results["call-1"] = "3";
  await conversation.send("", fields({}));
  await conversation.send("2 + 2?", fields({}));
  assert.deepEqual(asked[2].messages.map(({ role, content }) => [role, content]), [
    ["user", "1 + 2?"], ["assistant", null], ["tool", "3"], ["assistant", "3"], ["user", "2 + 2?"],
  ]);
  assert.deepEqual([asked[0].stream, asked[0].stream_options], [true, { include_usage: true }]);
});

test("a question that failed is not sent again with the next, but can be retried", async () => {
  const refuse = () => new Response('{"error": {"message": "busy"}}', { status: 503 });
  const fine = () => streamed(chunk({ content: "yes" }) + chunk({}, { finish_reason: "stop" }) + DONE)();
  const asked = serve(refuse, fine, refuse, fine);
  const conversation = new Conversation(() => {});
  await conversation.send("first", fields({}));
  await conversation.send("second", fields({}));
  assert.deepEqual(asked[1].messages.map(({ content }) => content), ["second"]);
  await conversation.send("third", fields({}));
  await conversation.retry(fields({}));
  assert.deepEqual(asked[3].messages.map(({ content }) => content), ["second", "yes", "third"]);
  assert.equal(conversation.lastAnswer.text, "yes");
});
