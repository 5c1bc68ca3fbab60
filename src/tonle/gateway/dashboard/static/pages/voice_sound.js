// The browser's side of sound: recording a question, reading a file, playing sentences one after the other.
//
// Uses Web Audio alone: no media element, so the content security policy allows none.

import { Activity } from "./voice_activity.js";
import { RATE, wavOf, withLength } from "./wav.js";

export const MAX_RECORDING_S = 120;
const LOOK_S = 0.05; // how often a listener looks how loud it is
const BEFORE_S = 2; // of sound before speech is noticed, at most: its first word is in there

// Why this page cannot record, in words; "" if it can.
export function whyNoMicrophone() {
  if (navigator.mediaDevices?.getUserMedia && globalThis.MediaRecorder) return "";
  return globalThis.isSecureContext
    ? "This browser cannot record sound: choose a file instead."
    : "Browsers give the microphone to pages over HTTPS or of this machine only: choose a file, or open the page that way.";
}

// A recording, or any file that the browser can read, as WAV with 16,000 samples per second.
export async function asWav(blob) {
  const context = new OfflineAudioContext(1, 1, RATE); // reading also converts to its rate
  let sound;
  try {
    sound = await context.decodeAudioData(await blob.arrayBuffer());
  } catch {
    throw new Error("The browser cannot read this sound. WAV, MP3, Ogg and WebM usually work.");
  }
  return wavOf(Array.from({ length: sound.numberOfChannels }, (_, i) => sound.getChannelData(i)));
}

async function openMicrophone() {
  try {
    return await navigator.mediaDevices.getUserMedia({ audio: { echoCancellation: true, noiseSuppression: true } });
  } catch (error) {
    throw new Error(error.name === "NotAllowedError"
      ? "This page may not use the microphone: allow it in the browser, then try again."
      : `There is no sound from a microphone (${error.message}).`);
  }
}

// One question from the microphone.
export class Recording {
  #recorder = null;
  #pieces = [];
  #timer = null;
  #isOver = false;

  // Resolves when it records. `onFull` is called when it has become as long as it may.
  async start(onFull) {
    const stream = await openMicrophone();
    if (this.#isOver) {
      turnOff(stream);
      return;
    }
    this.#recorder = new MediaRecorder(stream);
    this.#recorder.ondataavailable = ({ data }) => this.#pieces.push(data);
    this.#recorder.start();
    this.#timer = setTimeout(onFull, MAX_RECORDING_S * 1000);
  }

  // What was recorded, as a Blob; the microphone is off afterwards.
  async stop() {
    this.#isOver = true;
    clearTimeout(this.#timer);
    const recorder = this.#recorder;
    if (!recorder) return new Blob([]); // it had not begun
    const ended = new Promise((resolve) => (recorder.onstop = resolve));
    recorder.stop();
    await ended;
    turnOff(recorder.stream);
    return new Blob(this.#pieces, { type: recorder.mimeType });
  }
}

function turnOff(stream) {
  for (const track of stream.getTracks()) track.stop();
}

// Listens until it is stopped: tells when somebody begins to speak, and hands over what was said.
export class Listener {
  #stream = null;
  #context = null;
  #timer = null;
  #recorder = null;
  #begun_s = 0; // how long the recorder has run
  #isOver = false;

  // `onBegin()`, then `onEnd(blob)`, again and again.
  async start({ onBegin, onEnd }) {
    const stream = await openMicrophone();
    if (this.#isOver) {
      turnOff(stream);
      return;
    }
    this.#stream = stream;
    this.#context = new AudioContext();
    const analyser = this.#context.createAnalyser();
    this.#context.createMediaStreamSource(stream).connect(analyser);
    const samples = new Float32Array(analyser.fftSize);
    const activity = new Activity();
    this.#record();
    this.#timer = setInterval(() => {
      analyser.getFloatTimeDomainData(samples);
      const level = Math.sqrt(samples.reduce((sum, sample) => sum + sample * sample, 0) / samples.length);
      const event = activity.push(level, LOOK_S);
      this.#begun_s += LOOK_S;
      if (event === "began") onBegin();
      else if (event === "ended") this.#record(onEnd);
      else if (this.#begun_s > (activity.isSpeech ? MAX_RECORDING_S : BEFORE_S)) this.#record(activity.isSpeech ? onEnd : null);
    }, LOOK_S * 1000);
  }

  // Begin a new recording. The one before goes to `onEnd`, if that is given.
  #record(onEnd = null) {
    const recorder = new MediaRecorder(this.#stream);
    const before = this.#recorder;
    if (before) {
      before.ondataavailable = ({ data }) => onEnd?.(data); // without a time slice, all of it comes at once
      before.stop();
    }
    recorder.start();
    this.#recorder = recorder;
    this.#begun_s = 0;
  }

  stop() {
    this.#isOver = true;
    clearInterval(this.#timer);
    if (!this.#stream) return;
    this.#recorder.ondataavailable = null;
    this.#recorder.stop();
    turnOff(this.#stream);
    this.#context.close();
    this.#stream = null;
  }
}

// Plays sounds in the order in which they are added, without gaps.
export class Player {
  #context = null;
  #end = 0; // when what was added so far will have been played, in the context's time
  #playing = new Set(); // {source, finish}

  // To be called while a click or a key is handled: browsers play nothing before one.
  wake() {
    this.#context ??= new AudioContext();
    return this.#context.resume();
  }

  // `bytes`: a sound file. Resolves when it is planned, with {ended}: a promise of whether it was played to its end. Once `signal`
  // is aborted, nothing is played.
  async add(bytes, signal) {
    this.wake(); // not awaited: it would take until the next click
    const buffer = await this.#context.decodeAudioData(withLength(bytes));
    signal.throwIfAborted();
    const source = this.#context.createBufferSource();
    source.buffer = buffer;
    source.connect(this.#context.destination);
    const at = Math.max(this.#context.currentTime, this.#end);
    this.#end = at + buffer.duration;
    const sound = { source };
    const ended = new Promise((resolve) => (sound.finish = resolve));
    source.onended = () => {
      this.#playing.delete(sound);
      sound.finish(true);
    };
    this.#playing.add(sound);
    source.start(at);
    return { ended };
  }

  stop() {
    for (const { source, finish } of this.#playing) {
      finish(false);
      source.stop();
    }
    this.#playing.clear();
    this.#end = 0;
  }
}
