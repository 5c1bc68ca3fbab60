// A spoken conversation: transcription, language model and speech, streamed into each other. In memory only.
//
// Does: send the requests of a turn under one session id, hand on each sentence when it has ended, take times, stop. Does not: show
// anything, or know how sound is recorded and played (voice_sound.js).

import { send } from "../api.js";
import { newAnswer, stream } from "./chat_stream.js";
import { SentenceSplitter, speakable } from "./sentences.js";

export const SYSTEM = "You are spoken to, and your answer is read aloud: answer briefly, in plain sentences, without lists and markup.";
const AHEAD = 2; // sentences whose sound is there before their turn comes: an interruption wastes no more
const REDRAW_MS = 50;

export class VoiceConversation {
  #player;
  #controller = null;
  #listeners = new Set();
  #timer = null;

  // `player` has add(bytes, signal) and stop(), as Player of voice_sound.js.
  constructor(player) {
    this.#player = player;
    this.models = { asr: "", llm: "", tts: "" };
    this.voice = ""; // "": the model's own
    this.clear();
  }

  get isBusy() {
    return this.#controller !== null;
  }

  // Answer the question in `sound`, a WAV file as bytes. What is said at the moment is interrupted. Never throws: what went wrong
  // is in the turn.
  async ask(sound) {
    this.stop();
    const controller = (this.#controller = new AbortController());
    const turn = newTurn();
    this.turns.push(turn);
    this.changed();
    try {
      await this.#run(turn, sound, controller.signal);
      turn.state = "done";
    } catch (error) {
      turn.state = controller.signal.aborted ? "stopped" : "failed";
      if (turn.state === "failed") turn.error = error instanceof Error ? error.message : String(error);
      controller.abort(); // the other requests of this turn
      if (this.#controller === controller) this.#player.stop();
    }
    if (this.#controller === controller) this.#controller = null;
    this.changed();
  }

  // Everything: the open requests, and the sound that is played.
  stop() {
    this.#controller?.abort();
    this.#controller = null;
    this.#player.stop();
    this.changed();
  }

  clear() {
    this.stop();
    this.turns = [];
    this.session = newSession();
  }

  // What the model is sent: of an answer that was interrupted, what was heard of it.
  messages(question) {
    const found = [{ role: "system", content: SYSTEM }];
    for (const turn of this.turns) {
      const said = turn.state === "done" ? turn.answer.text : heard(turn);
      if (said) found.push({ role: "user", content: turn.question }, { role: "assistant", content: said });
    }
    return [...found, { role: "user", content: question }];
  }

  listen(callback) {
    this.#listeners.add(callback);
    return () => this.#listeners.delete(callback);
  }

  // Tell the page soon.
  changed() {
    this.#timer ??= setTimeout(() => {
      this.#timer = null;
      for (const callback of this.#listeners) callback();
    }, REDRAW_MS);
  }

  async #run(turn, sound, signal) {
    turn.question = await this.#transcribe(turn, sound, signal);
    if (!turn.question) throw new Error("Nothing was said in this recording.");
    turn.state = "answering";
    const sentences = new Sentences(signal);
    await Promise.all([this.#write(turn, sentences, signal), this.#speak(turn, sentences, signal)]);
  }

  async #transcribe(turn, sound, signal) {
    const form = new FormData();
    form.append("model", this.models.asr);
    form.append("file", new Blob([sound], { type: "audio/wav" }), "question.wav");
    const leg = begin(turn, "Transcription");
    const response = await this.#send("/v1/audio/transcriptions", { form, signal }, leg);
    const { text } = await response.json();
    end(turn, leg);
    mark(turn, "transcribed");
    this.changed();
    return text.trim();
  }

  async #write(turn, sentences, signal) {
    const body = { model: this.models.llm, messages: this.messages(turn.question) };
    const leg = begin(turn, "Language model");
    const answer = (turn.answer = newAnswer());
    const splitter = new SentenceSplitter();
    let numSeen = 0;
    const handOn = (found) => {
      for (const sentence of found.map(speakable).filter(Boolean)) {
        mark(turn, "sentence");
        sentences.add(sentence);
      }
    };
    const changed = () => {
      if (answer.text) mark(turn, "token");
      handOn(splitter.push(answer.text.slice(numSeen)));
      numSeen = answer.text.length;
      this.changed();
    };
    await stream(body, answer, { signal, headers: this.#headers, changed });
    leg.requestId = answer.requestId;
    leg.firstAt = answer.firstAt === null ? null : answer.firstAt - turn.start;
    if (answer.state !== "done") throw new Error(answer.error ?? "The answer was stopped.");
    end(turn, leg);
    mark(turn, "text");
    handOn(splitter.end());
    sentences.close();
  }

  // One sentence after the other, in their order: the next is asked for while this one is played.
  async #speak(turn, sentences, signal) {
    const planned = []; // promises of their ends
    for (;;) {
      const sentence = await sentences.next();
      if (sentence === null) break;
      if (planned.length >= AHEAD) await planned.shift();
      const json = { model: this.models.tts, input: sentence, response_format: "wav", ...(this.voice ? { voice: this.voice } : {}) };
      const leg = begin(turn, "Speech", sentence);
      const response = await this.#send("/v1/audio/speech", { json, signal }, leg);
      leg.firstAt = now(turn);
      const bytes = await response.arrayBuffer();
      end(turn, leg);
      const { ended } = await this.#player.add(bytes, signal);
      mark(turn, "audio");
      turn.state = "speaking";
      turn.spoken.push(sentence);
      planned.push(ended.then((isWhole) => (turn.numHeard += isWhole ? 1 : 0)));
      this.changed();
    }
    await Promise.all(planned);
    signal.throwIfAborted();
    mark(turn, "speech");
  }

  get #headers() {
    return { "X-Session-Id": this.session };
  }

  async #send(path, options, leg) {
    const response = await send("POST", path, { ...options, headers: this.#headers });
    leg.requestId = response.headers.get("x-request-id");
    return response;
  }
}

// Sentences on their way from the model to the speaker.
class Sentences {
  #waiting = [];
  #isClosed = false;
  #wake = () => {};

  constructor(signal) {
    signal.addEventListener("abort", () => this.close());
  }

  add(sentence) {
    this.#waiting.push(sentence);
    this.#wake();
  }

  close() {
    this.#isClosed = true;
    this.#wake();
  }

  // null: there are no more.
  async next() {
    while (!this.#waiting.length && !this.#isClosed) await new Promise((resolve) => (this.#wake = resolve));
    return this.#waiting.shift() ?? null;
  }
}

// Times are milliseconds since the question was complete.
function newTurn() {
  return {
    state: "transcribing", // then: answering, speaking, done, stopped, failed
    question: "",
    answer: null, // as chat_stream.js has it
    spoken: [], // sentences whose sound was handed to the player
    numHeard: 0, // of these, played to their ends
    legs: [], // {name, text, askedAt, firstAt, endedAt, requestId}
    marks: {}, // transcribed, token, sentence, audio, text, speech: when it was there first
    error: null,
    start: performance.now(),
  };
}

const now = (turn) => performance.now() - turn.start;
const mark = (turn, name) => (turn.marks[name] ??= now(turn));
const heard = (turn) => turn.spoken.slice(0, turn.numHeard + 1).join(" ");

function begin(turn, name, text = "") {
  const leg = { name, text, askedAt: now(turn), firstAt: null, endedAt: null, requestId: null };
  turn.legs.push(leg);
  return leg;
}

function end(turn, leg) {
  leg.endedAt = now(turn);
}

// Not randomUUID: pages over plain HTTP do not have it.
function newSession() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return `voice-${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}
