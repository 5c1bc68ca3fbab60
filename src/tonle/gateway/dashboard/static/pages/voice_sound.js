// The browser's side of sound: recording a question, reading a file, playing sentences one after the other.
//
// Uses Web Audio alone: no media element, so the content security policy allows none.

import { RATE, wavOf, withLength } from "./wav.js";

export const MAX_RECORDING_S = 120;

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

// One question from the microphone.
export class Recording {
  #recorder = null;
  #pieces = [];
  #timer = null;
  #isOver = false;

  // Resolves when it records. `onFull` is called when it has become as long as it may.
  async start(onFull) {
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({ audio: { echoCancellation: true, noiseSuppression: true } });
    } catch (error) {
      throw new Error(error.name === "NotAllowedError"
        ? "This page may not use the microphone: allow it in the browser, then try again."
        : `There is no sound from a microphone (${error.message}).`);
    }
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
