// A spoken conversation: sentences, WAV files, and the three kinds of requests streamed into each other.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { factWords, understands } from "./static/pages/model_facts.js";
import { SentenceSplitter, speakable } from "./static/pages/sentences.js";
import { Activity } from "./static/pages/voice_activity.js";
import { VoiceConversation } from "./static/pages/voice_conversation.js";
import { wavOf, withLength } from "./static/pages/wav.js";

const CASES = JSON.parse(readFileSync(new URL("./sentences.json", import.meta.url)));

function sentencesOf(pieces) {
  const splitter = new SentenceSplitter();
  return [...pieces.flatMap((piece) => splitter.push(piece)), ...splitter.end()];
}

test("sentences end where they end for the program in Python, however the text is cut", () => {
  assert.ok(Object.keys(CASES).length > 8);
  for (const [name, sentences] of Object.entries(CASES)) {
    const text = sentences.join("");
    assert.deepEqual(sentencesOf([text]), sentences, name);
    assert.deepEqual(sentencesOf(text.split("")), sentences, name);
  }
});

test("a text without ends is cut, and no letter is lost", () => {
  for (const text of ["word ".repeat(200), "x".repeat(700), "👋".repeat(300), "ស្ត្រី".repeat(90), "!".repeat(500)]) {
    const found = sentencesOf([text]);
    assert.equal(found.join(""), text);
    assert.ok(found.every((sentence) => sentence.length <= 240));
    for (const sentence of found) encodeURIComponent(sentence); // throws at half a letter
  }
});

test("marks of Markdown are not spoken", () => {
  const texts = ["**Bold.** ", "## A `title`\n", "- one\n", "* two", "---\n", "\n", "3 * 4 in C# and snake_case", "_so_", " ភ្នំពេញ។"];
  assert.deepEqual(texts.map(speakable), ["Bold.", "A title", "one", "two", "", "", "3 * 4 in C# and snake_case", "so", "ភ្នំពេញ។"]);
});

test("channels are mixed into one, and samples stay within 16 bits", () => {
  const file = wavOf([new Float32Array([0, 1, 2]), new Float32Array([0, 0, 2])]);
  const view = new DataView(file.buffer);
  assert.equal(new TextDecoder().decode(file.slice(0, 4)), "RIFF");
  assert.deepEqual([view.getUint32(24, true), view.getUint16(34, true), view.getUint32(40, true)], [16000, 16, 6]);
  assert.deepEqual([44, 46, 48].map((at) => view.getInt16(at, true)), [0, 16384, 32767]);
});

test("a streamed file gets its length, whatever it was said to be", () => {
  for (const said of [0xffffffff, 0x7fffffff, 6]) {
    const { buffer } = wavOf([new Float32Array(3)]);
    new DataView(buffer).setUint32(40, said, true);
    new DataView(buffer).setUint32(4, said, true);
    assert.deepEqual(new Uint8Array(withLength(buffer)), wavOf([new Float32Array(3)]));
  }
  assert.equal(withLength(new ArrayBuffer(5)).byteLength, 5);
});

// What is told of levels that last so many steps of 50 ms.
function told(...parts) {
  const activity = new Activity();
  return parts.flatMap(([level, steps]) => Array.from({ length: steps }, () => activity.push(level, 0.05)).filter(Boolean));
}

test("speech begins after a fifth of a second and ends after a pause, in quiet and in noisy rooms", () => {
  assert.deepEqual(told([0.001, 40], [0.1, 20], [0.001, 17]), ["began"]);
  assert.deepEqual(told([0.001, 40], [0.1, 20], [0.001, 18]), ["began", "ended"]);
  assert.deepEqual(told([0.001, 40], [0.1, 3], [0.001, 40]), [], "a cough");
  assert.deepEqual(told([0.1, 20], [0.001, 10], [0.1, 20], [0.001, 20]), ["began", "ended"], "a pause between words");
  assert.deepEqual(told([0.02, 400], [0.3, 20], [0.02, 40]).slice(-2), ["began", "ended"], "a fan");
});

test("facts of a pool in words", () => {
  assert.equal(factWords({ sample_rate: 16000, voices: ["a", "b"], languages: ["1", "2", "3", "4", "5"], more: {} }), "16 kHz · voices a, b · 5 languages");
  assert.equal(factWords({ max_audio_s: 3600, max_input_chars: 4096, translates: false, batches: true, dimensions: 1024, bias: 0.5 }),
    "recordings up to 1 h · texts up to 4,096 characters · batches yes · dimensions 1,024 · bias 0.50");
  assert.equal(factWords(undefined), "");
  const told = [["en"], ["en", "km"], ["1", "2", "3", "4", "5"], ["not a code"], undefined].map((languages) => understands({ languages }));
  assert.deepEqual(told, ["It understands English only.", "It understands English, Khmer only.", "", "It understands not a code only.", ""]);
});

const PIECES = ["The Me", "kong. Th", "e Tonle Sap", ". Both a", "re long."];
const SENTENCES = ["The Mekong.", "The Tonle Sap.", "Both are long."];
const event = (content) => `data: ${JSON.stringify({ model: "m", choices: [{ delta: { content } }] })}\n\n`;

// A promise and the function that fulfils it.
function gate() {
  let open;
  const opened = new Promise((resolve) => (open = resolve));
  return { open, opened };
}

// A server: `log` says what happened, `text` holds the model's answer after its second piece until it is opened.
function serve({ text = Promise.resolve(), refuse = {} } = {}) {
  const log = [];
  const encode = (words) => new TextEncoder().encode(words);
  globalThis.fetch = async (path, { body, headers, signal }) => {
    const name = path.split("/").at(-1);
    log.push({ name, body, session: headers["X-Session-Id"] });
    signal.addEventListener("abort", () => log.push({ name: `${name} aborted` }));
    if (refuse[name]) return new Response(JSON.stringify({ error: { message: refuse[name] } }), { status: 503 });
    const reply = { headers: { "x-request-id": `req-${log.length}` } };
    if (name === "transcriptions") return new Response(JSON.stringify({ text: " Name two rivers. " }), reply);
    if (name === "speech") return new Response(encode(JSON.parse(body).input), reply);
    return new Response(new ReadableStream({
      async start(controller) {
        signal.addEventListener("abort", () => controller.error(signal.reason));
        for (const piece of PIECES.slice(0, 2)) controller.enqueue(encode(event(piece)));
        await text;
        if (signal.aborted) return;
        for (const piece of PIECES.slice(2)) controller.enqueue(encode(event(piece)));
        controller.enqueue(encode("data: [DONE]\n\n"));
        controller.close();
      },
    }), reply);
  };
  return log;
}

// Plays nothing: sounds end when `end()` is called, or at once.
class FakePlayer {
  constructor({ holds = false } = {}) {
    this.holds = holds;
    this.played = [];
    this.open = [];
    this.heard = gate();
  }

  async add(bytes, signal) {
    signal.throwIfAborted();
    this.played.push(new TextDecoder().decode(bytes));
    this.heard.open();
    return { ended: this.holds ? new Promise((resolve) => this.open.push(resolve)) : Promise.resolve(true) };
  }

  stop() {
    for (const resolve of this.open?.splice(0) ?? []) resolve(false);
  }
}

function newConversation(player) {
  const found = new VoiceConversation(player);
  found.models = { asr: "ears", llm: "m", tts: "mouth" };
  return found;
}

const names = (log) => log.map(({ name }) => name);

test("a question is transcribed, answered and spoken in order, under one session", async () => {
  const log = serve();
  const player = new FakePlayer();
  const conversation = newConversation(player);
  await conversation.ask(new Uint8Array(44));
  const [turn] = conversation.turns;
  assert.deepEqual([turn.state, turn.question, turn.answer.text], ["done", "Name two rivers.", SENTENCES.join(" ")]);
  assert.deepEqual(player.played, SENTENCES);
  assert.deepEqual(names(log), ["transcriptions", "completions", "speech", "speech", "speech"]);
  assert.deepEqual([...new Set(log.map(({ session }) => session))], [conversation.session]);
  assert.equal(log[0].body.get("model"), "ears");
  assert.deepEqual(turn.legs.map(({ requestId }) => requestId), ["req-1", "req-2", "req-3", "req-4", "req-5"]);
  assert.ok(turn.legs.every(({ askedAt, endedAt }) => askedAt <= endedAt));
  assert.deepEqual(Object.keys(turn.marks).sort(), ["audio", "sentence", "speech", "text", "token", "transcribed"]);
  assert.ok(!conversation.isBusy);
});

test("the first sentence is heard before the text is complete", async () => {
  const { open, opened } = gate();
  serve({ text: opened });
  const player = new FakePlayer();
  const conversation = newConversation(player);
  const asked = conversation.ask(new Uint8Array(44));
  await player.heard.opened;
  assert.deepEqual([player.played, conversation.turns[0].marks.text], [[SENTENCES[0]], undefined]);
  open();
  await asked;
  assert.deepEqual(player.played, SENTENCES);
});

test("no more than two sentences are spoken ahead of their turn", async () => {
  const log = serve();
  const player = new FakePlayer({ holds: true });
  const conversation = newConversation(player);
  const asked = conversation.ask(new Uint8Array(44));
  while (player.played.length < 2) await new Promise((resolve) => setImmediate(resolve));
  for (let i = 0; i < 20; i += 1) await new Promise((resolve) => setImmediate(resolve));
  assert.equal(names(log).filter((name) => name === "speech").length, 2);
  player.holds = false;
  for (const resolve of player.open.splice(0)) resolve(true);
  await asked;
  assert.deepEqual(player.played, SENTENCES);
});

test("talking again interrupts: requests are cancelled, and the model is told what was heard", async () => {
  const log = serve({ text: new Promise(() => {}) });
  const player = new FakePlayer({ holds: true });
  const conversation = newConversation(player);
  const asked = conversation.ask(new Uint8Array(44));
  await player.heard.opened;
  const next = serve();
  player.holds = false;
  const again = conversation.ask(new Uint8Array(44));
  await asked;
  assert.ok(names(log).includes("completions aborted"));
  await again;
  assert.deepEqual(conversation.turns.map(({ state }) => state), ["stopped", "done"]);
  const { messages } = JSON.parse(next.find(({ name }) => name === "completions").body);
  assert.deepEqual(messages.slice(1).map(({ content }) => content), ["Name two rivers.", SENTENCES[0], "Name two rivers."]);
});

test("Stop ends everything, and nothing is asked for afterwards", async () => {
  const log = serve({ text: new Promise(() => {}) });
  const player = new FakePlayer({ holds: true });
  const conversation = newConversation(player);
  const asked = conversation.ask(new Uint8Array(44));
  await player.heard.opened;
  conversation.stop();
  await asked;
  const { length } = log;
  assert.deepEqual([conversation.isBusy, conversation.turns[0].state], [false, "stopped"]);
  for (let i = 0; i < 20; i += 1) await new Promise((resolve) => setImmediate(resolve));
  assert.equal(log.length, length);
});

test("a leg that fails stops the others, and its words are shown", async () => {
  for (const name of ["transcriptions", "completions", "speech"]) {
    serve({ refuse: { [name]: "out of order" }, text: name === "speech" ? new Promise(() => {}) : Promise.resolve() });
    const conversation = newConversation(new FakePlayer());
    await conversation.ask(new Uint8Array(44));
    assert.deepEqual([conversation.turns[0].state, conversation.turns[0].error], ["failed", "Out of order."], name);
    assert.ok(!conversation.isBusy);
  }
});
