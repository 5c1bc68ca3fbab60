// The page "voice": ask with the microphone or a file, hear the answer while it is written, see where the time went.

import { get } from "../api.js";
import { seconds } from "../format.js";
import { html, useEffect, useRef, useState } from "../html.js";
import { inWords, Message, PageHeading } from "../widgets.js";
import { understands } from "./model_facts.js";
import { VoiceConversation } from "./voice_conversation.js";
import { asWav, Listener, MAX_RECORDING_S, Player, Recording, whyNoMicrophone } from "./voice_sound.js";

export const title = "Voice";

const COMMAND = "tonle serve --worker asr --worker tts";
const player = new Player();
const conversation = new VoiceConversation(player); // outlives the page: a look at another one loses nothing

// By kind: the models that transcribe, answer and speak. Adapters answer, too.
export function byKind(entries) {
  const of = (kind) => entries.filter((entry) => (entry.kind ?? "llm") === kind);
  return { asr: of("asr"), llm: of("llm"), tts: of("tts") };
}

export default function VoicePage({ session }) {
  const isAllowed = Boolean(session.can_use_models);
  const [state, setState] = useState({ models: null, error: "" });
  useEffect(() => {
    if (!isAllowed) return;
    get("/v1/models").then(
      ({ data }) => setState({ models: byKind(data), error: "" }),
      (problem) => setState({ models: null, error: inWords(problem) }),
    );
  }, [isAllowed]);
  const { models, error } = state;
  const isComplete = models !== null && Object.values(models).every((group) => group.length > 0);
  return html`<${PageHeading} title=${title} />
    ${!isAllowed && html`<${Message} testid="voice-disabled">Talking needs a key that may use models: sign in with one that has the scope
      models as well as dashboard, or with an admin's.<//>`}
    ${error && html`<${Message} kind="bad">${error}<//>`}
    ${isAllowed && !models && !error && html`<p class="hint">Loading the list of models …</p>`}
    ${models && !isComplete && html`<${Missing} models=${models} />`}
    ${isComplete && html`<${Talk} models=${models} hasAudit=${Boolean(session.has?.audit)} />`}`;
}

const NEEDED = { asr: "transcribes speech", llm: "answers", tts: "speaks" };

function Missing({ models }) {
  const missing = Object.keys(NEEDED).filter((kind) => !models[kind].length).map((kind) => NEEDED[kind]);
  return html`<section class="card" data-testid="voice-disabled">
    <h2>This server cannot talk yet</h2>
    <p>It has no model that ${missing.join(", and none that ")}. Start it with workers for speech, beside its language model:</p>
    <pre>${COMMAND}</pre>
  </section>`;
}

// Draws again whenever the conversation changes. Leaving the page stops it.
function useConversation(models) {
  const [, update] = useState(0);
  useEffect(() => {
    for (const [kind, group] of Object.entries(models)) {
      if (!group.some(({ id }) => id === conversation.models[kind])) conversation.models[kind] = group[0].id;
    }
    update((times) => times + 1);
    const unlisten = conversation.listen(() => update((times) => times + 1));
    return () => {
      unlisten();
      conversation.stop();
    };
  }, [models]);
  return conversation;
}

// What is below the window's edge is brought into it when a turn begins, is answered, and ends.
function useNewestInView({ turns }) {
  const log = useRef(null);
  useEffect(() => {
    if (turns.length > 1) log.current.lastElementChild.scrollIntoView({ block: "nearest" });
  }, [turns.length, turns.at(-1)?.state]);
  return log;
}

function Talk({ models, hasAudit }) {
  const state = useConversation(models);
  const log = useNewestInView(state);
  const { facts } = models.asr.find(({ id }) => id === state.models.asr) ?? {};
  return html`<div class="playground voice" data-testid="voice">
    <div class="playground-main">
      <${Controls} state=${state} />
      <div class="voice-log" role="log" aria-label="Conversation" aria-busy=${state.isBusy ? "true" : "false"} ref=${log}>
        ${!state.turns.length && html`<p class="hint" data-testid="voice-empty">Nothing was said yet. What you say is written down, answered, and the
          answer is spoken sentence by sentence while the rest is written. Conversations are kept in this page alone.</p>`}
        ${state.turns.map((turn, i) => html`<${Turn} key=${`${state.session}-${i}`} turn=${turn} />`)}
      </div>
    </div>
    <aside class="card controls" aria-label="Models">
      <${Choice} label="Transcribes" kind="asr" models=${models.asr} state=${state} hint=${understands(facts)} />
      <${Choice} label="Answers" kind="llm" models=${models.llm} state=${state} />
      <${Choice} label="Speaks" kind="tts" models=${models.tts} state=${state} />
      <${VoiceChoice} models=${models.tts} state=${state} />
      <p class="hint">Every request has the session id <code data-testid="voice-session">${state.session}</code>${hasAudit
        ? ", under which the audit trail has the whole conversation." : "."}</p>
    </aside>
  </div>`;
}

// Records from the first click to the second, or listens all the time. Speaking interrupts whatever is said.
function Controls({ state }) {
  const recording = useRef(null);
  const listener = useRef(null);
  const [isHandsFree, setHandsFree] = useState(false);
  const [isHearing, setHearing] = useState(false);
  const [isRecording, setRecording] = useState(false);
  const [error, setError] = useState("");
  const noMicrophone = whyNoMicrophone();
  useEffect(() => () => {
    recording.current?.stop();
    listener.current?.stop();
  }, []);

  const attempt = async (action) => {
    setError("");
    try {
      await action();
    } catch (problem) {
      recording.current = null;
      setRecording(false);
      setError(problem.message);
    }
  };
  const begin = () => attempt(async () => {
    if (recording.current) return; // the browser asks whether it may
    state.stop();
    player.wake();
    recording.current = new Recording();
    await recording.current.start(send);
    setRecording(true);
  });
  const send = () => attempt(async () => {
    const done = recording.current;
    if (!done) return;
    recording.current = null;
    setRecording(false);
    state.ask(await asWav(await done.stop()));
  });
  const sendFile = (event) => attempt(async () => {
    const [file] = event.target.files;
    event.target.value = ""; // the same file can be chosen again
    if (!file) return;
    player.wake();
    state.stop();
    state.ask(await asWav(file));
  });
  const stop = () => attempt(async () => {
    state.stop();
    const unsent = recording.current;
    recording.current = null;
    setRecording(false);
    await unsent?.stop();
  });
  const onBegin = () => {
    setHearing(true);
    state.stop();
  };
  const onEnd = (blob) => attempt(async () => {
    setHearing(false);
    state.ask(await asWav(blob));
  });
  const listen = (event) => {
    const { checked } = event.target;
    listener.current?.stop();
    listener.current = checked ? new Listener() : null;
    setHandsFree(checked);
    setHearing(false);
    setError("");
    if (!checked) return;
    player.wake();
    listener.current.start({ onBegin, onEnd }).catch((problem) => {
      listener.current = null;
      setHandsFree(false);
      setError(problem.message);
    });
  };
  const onKeyDown = (event) => {
    if (event.key === "Escape") stop();
  };
  const words = isRecording || isHearing ? `Listening, for up to ${seconds(MAX_RECORDING_S)}.` : stateWords(state, isHandsFree);
  return html`<section class="card voice-controls" onKeyDown=${onKeyDown}>
    <div class="composer-actions">
      <button type="button" class="primary" disabled=${Boolean(noMicrophone) || isHandsFree} data-testid="talk" onClick=${isRecording ? send : begin}>
        ${isRecording ? "Send the question" : state.isBusy ? "Interrupt and talk" : "Talk"}</button>
      <button type="button" disabled=${!state.isBusy && !isRecording} data-testid="voice-stop" onClick=${stop}>Stop</button>
      <button type="button" disabled=${!state.turns.length} data-testid="voice-clear" onClick=${() => state.clear()}>Clear</button>
      <label class="check"><input type="checkbox" checked=${isHandsFree} disabled=${Boolean(noMicrophone) || isRecording} data-testid="hands-free"
        onChange=${listen} /> Hands-free</label>
      <label class="voice-file">Or a recording <input type="file" accept="audio/*" data-testid="voice-file" onChange=${sendFile} /></label>
    </div>
    <p class="hint" role="status" data-testid="voice-state">${words}</p>
    ${noMicrophone && html`<p class="hint">${noMicrophone}</p>`}
    ${error && html`<${Message} kind="bad" testid="voice-error">${error}<//>`}
  </section>`;
}

const STATES = { transcribing: "Listening to what was said …", answering: "Thinking …", speaking: "Speaking. Talk to interrupt." };

function stateWords(state, isHandsFree) {
  const idle = isHandsFree ? "Speak whenever you like. Escape stops an answer." : "Click Talk, speak, and click again. Escape stops.";
  return (state.isBusy ? STATES[state.turns.at(-1)?.state] : null) ?? idle;
}

function Choice({ label, kind, models, state, hint = "" }) {
  const choose = (event) => {
    state.models[kind] = event.target.value;
    if (kind === "tts") state.voice = "";
    state.changed();
  };
  return html`<label class="field"><span>${label}</span>
    <select data-testid=${`voice-${kind}`} value=${state.models[kind]} disabled=${state.isBusy} onChange=${choose}>
      ${models.map(({ id }) => html`<option key=${id} value=${id}>${id}</option>`)}
    </select>${hint && html`<span class="hint" data-testid=${`voice-${kind}-hint`}>${hint}</span>`}</label>`;
}

// Of models that say which voices they have.
function VoiceChoice({ models, state }) {
  const voices = models.find(({ id }) => id === state.models.tts)?.facts?.voices ?? [];
  if (!voices.length) return null;
  const choose = (event) => {
    state.voice = event.target.value;
    state.changed();
  };
  return html`<label class="field"><span>Voice</span>
    <select data-testid="voice-voice" value=${state.voice} onChange=${choose}>
      <option value="">the model's own</option>
      ${voices.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
    </select></label>`;
}

function Turn({ turn }) {
  const { question, answer, state, error } = turn;
  return html`<article class="card voice-turn" data-testid="voice-turn" data-state=${state}>
    ${question && html`<div class="turn turn-user"><h3 class="turn-name">You</h3>
      <div class="turn-text" dir="auto" data-testid="voice-question">${question}</div></div>`}
    ${answer && html`<div class="turn"><h3 class="turn-name">${answer.model ?? "Answer"}</h3>
      <div class="turn-text" dir="auto" data-testid="voice-answer">${answer.text}</div></div>`}
    ${state === "stopped" && html`<p class="hint">Stopped.</p>`}
    ${error && html`<${Message} kind="bad" testid="voice-failure">${error}<//>`}
    <${Marks} marks=${turn.marks} />
    ${turn.legs.length > 0 && html`<${Legs} legs=${turn.legs} />`}
  </article>`;
}

const MARKS = {
  transcribed: "transcribed", token: "first token", sentence: "first sentence", audio: "first audio", text: "text complete",
  speech: "spoken",
};

function Marks({ marks }) {
  const known = Object.entries(MARKS).filter(([name]) => marks[name] !== undefined).sort(([a], [b]) => marks[a] - marks[b]);
  if (!known.length) return null;
  return html`<dl class="figures" data-testid="voice-marks">
    ${known.map(([name, words]) => html`<div key=${name}><dt>${words}</dt><dd data-testid=${`mark-${name}`}>${seconds(marks[name] / 1000)}</dd></div>`)}
  </dl>`;
}

const time = (at) => (at === null ? "–" : seconds(at / 1000));

function Legs({ legs }) {
  return html`<details class="voice-legs" data-testid="voice-legs">
    <summary>Requests: ${legs.length}</summary>
    <div class="table-box" tabindex="0" role="region" aria-label="Requests of this turn"><table>
      <thead><tr><th scope="col">Request</th><th scope="col" class="right">Asked</th><th scope="col" class="right">First</th><th scope="col" class="right">Ended</th></tr></thead>
      <tbody>${legs.map((leg, i) => html`<tr key=${i}>
        <td>${leg.requestId
          ? html`<a href=${`#/requests/${encodeURIComponent(leg.requestId)}`}>${leg.name}</a>`
          : leg.name}${leg.text && html`<div class="hint voice-sentence" dir="auto">${leg.text}</div>`}</td>
        <td class="right">${time(leg.askedAt)}</td><td class="right">${time(leg.firstAt)}</td><td class="right">${time(leg.endedAt)}</td></tr>`)}
      </tbody>
    </table></div>
  </details>`;
}
