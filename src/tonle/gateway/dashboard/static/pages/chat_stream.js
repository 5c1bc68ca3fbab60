// One streamed answer of /v1/chat/completions: sends the request, puts the pieces together, takes the times.
//
// Does: fetch, read events, add up deltas, stop on a signal. Does not: show anything.

import { send } from "../api.js";
import { EventParser } from "./event_parser.js";

// An answer that has not begun. Times are milliseconds of performance.now().
export function newAnswer() {
  return {
    state: "waiting", // then: streaming, done, stopped, failed
    text: "",
    reasoning: "",
    toolCalls: [], // {id, name, arguments}
    finish: null,
    usage: null,
    error: null, // in words
    requestId: null,
    model: null,
    numPieces: 0, // chunks that brought something
    sentAt: performance.now(),
    firstAt: null,
    lastAt: null,
  };
}

// Send `body` and fill `answer`; `changed` is called after each piece that was read. Never throws: what went wrong is in the
// answer. `signal` stops it. Returns the answer.
export async function stream(body, answer, { signal, headers, changed = () => {} }) {
  try {
    const json = { ...body, stream: true, stream_options: { include_usage: true } };
    const response = await send("POST", "/v1/chat/completions", { json, signal, headers });
    answer.requestId = response.headers.get("x-request-id");
    await read(response.body, answer, changed);
    if (answer.state !== "failed") answer.state = "done";
  } catch (error) {
    answer.state = signal?.aborted ? "stopped" : "failed";
    if (!signal?.aborted) answer.error = error instanceof Error ? error.message : String(error);
  }
  changed();
  return answer;
}

async function read(body, answer, changed) {
  const parser = new EventParser();
  const reader = body.getReader();
  let isDone = false;
  const take = (events) => {
    for (const { data } of events) isDone = addEvent(answer, data) || isDone;
    if (events.length) changed();
  };
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    take(parser.push(value));
  }
  take(parser.end());
  if (!isDone && answer.state !== "failed" && answer.finish === null) {
    throw new Error("The answer broke off: the connection ended before the server said it was complete.");
  }
}

// Add one event; whether it was the last.
export function addEvent(answer, data) {
  if (data === "[DONE]") return true;
  let chunk;
  try {
    chunk = JSON.parse(data);
  } catch {
    throw new Error(`The server sent something that is not JSON: ${data.slice(0, 200)}`);
  }
  if (chunk.error) {
    answer.state = "failed";
    answer.error = messageOf(chunk.error);
    return false;
  }
  answer.model = chunk.model ?? answer.model;
  if (chunk.usage) answer.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (choice) addDelta(answer, choice);
  return false;
}

function addDelta(answer, choice) {
  const delta = choice.delta ?? {};
  const thought = delta.reasoning_content ?? delta.reasoning ?? "";
  const text = delta.content ?? "";
  answer.text += text;
  answer.reasoning += thought;
  for (const piece of delta.tool_calls ?? []) addToolCall(answer.toolCalls, piece);
  if (choice.finish_reason) answer.finish = choice.finish_reason;
  if (text || thought || delta.tool_calls?.length) {
    answer.state = "streaming";
    answer.numPieces += 1;
    answer.lastAt = performance.now();
    answer.firstAt ??= answer.lastAt;
  }
}

function addToolCall(calls, piece) {
  const index = piece.index ?? calls.length;
  while (calls.length <= index) calls.push({ id: "", name: "", arguments: "" });
  const call = calls[index];
  if (piece.id) call.id = piece.id;
  call.name += piece.function?.name ?? "";
  call.arguments += piece.function?.arguments ?? "";
}

const messageOf = (error) => (typeof error === "string" ? error : error?.message) || "The server reported an error.";

// Figures of an answer, also while it streams: seconds, tokens; null: not known yet.
export function figuresOf(answer) {
  const { usage, firstAt, lastAt, sentAt, numPieces } = answer;
  const completion = usage?.completion_tokens ?? null;
  const tokens = completion ?? numPieces; // until the usage comes, a piece is taken for a token
  const span = firstAt === null ? 0 : (lastAt - firstAt) / 1000;
  return {
    ttft_s: firstAt === null ? null : (firstAt - sentAt) / 1000,
    total_s: lastAt === null ? null : (lastAt - sentAt) / 1000,
    tokens_per_s: span > 0 && tokens > 1 ? (tokens - 1) / span : null,
    is_estimate: completion === null,
    prompt_tokens: usage?.prompt_tokens ?? null,
    cached_tokens: usage?.prompt_tokens_details?.cached_tokens ?? null,
    completion_tokens: completion,
  };
}

// The answer as a message of the conversation.
export function messageOfAnswer(answer) {
  const message = { role: "assistant", content: answer.text || null };
  if (answer.toolCalls.length) {
    message.tool_calls = answer.toolCalls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
  } else {
    message.content ??= "";
  }
  return message;
}
