// Small pieces that several pages use: cards, messages near an action, buttons that do something on the server.

import { ApiError, get } from "./api.js";
import { html, useCallback, useEffect, useRef, useState } from "./html.js";

export function PageHeading({ title, children }) {
  return html`<header class="page-heading"><h1>${title}</h1><div class="page-tools">${children}</div></header>`;
}

// A figure with its name. `value` is the text alternative of the chart below it.
export function Card({ title, value = null, wide = false, testid, children }) {
  return html`
    <section class=${`card${wide ? " card-wide" : ""}`} data-testid=${testid}>
      <h2>${title}${value !== null && html`<span class="card-value" data-testid=${testid && `${testid}-value`}>${value}</span>`}</h2>
      ${children}
    </section>`;
}

// kind: info, good, warning, bad. Read aloud when it appears, bad ones at once.
export function Message({ kind = "info", children, testid }) {
  const label = { good: "Done", warning: "Note", bad: "Error" }[kind];
  return html`
    <p class=${`message ${kind}`} role=${kind === "bad" ? "alert" : "status"} data-testid=${testid}>
      ${label && html`<b>${label}: </b>`}${children}
    </p>`;
}

// A state in a word, told by its text and not by its colour alone.
export const Badge = ({ kind = "info", children }) => html`<span class=${`badge ${kind}`}>${children}</span>`;

// Runs `onRun` (async) when clicked; while it runs the button is busy, and its error is shown beside it.
// `disabledReason`: the button is disabled, and says why. `confirm`: a question that has to be answered first.
export function ActionButton({ onRun, disabledReason = null, confirm = null, kind = "", testid, label, children }) {
  const [isBusy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  const [isAsking, setAsking] = useState(false);
  const button = useRef(null);
  const isMounted = useMounted();
  const run = async () => {
    setAsking(false);
    setBusy(true);
    setError(null);
    try {
      await onRun();
    } catch (problem) {
      if (isMounted.current) setError(inWords(problem));
    }
    if (isMounted.current) setBusy(false);
  };
  const refuse = () => {
    setAsking(false);
    setTimeout(() => button.current?.focus());
  };
  if (isAsking) return html`<${Confirm} question=${confirm} testid=${testid && `${testid}-confirm`} onYes=${run} onNo=${refuse} />`;
  return html`
    <span class="action" title=${disabledReason}>
      <button type="button" ref=${button} class=${kind} aria-label=${label} aria-busy=${isBusy} disabled=${isBusy || disabledReason !== null}
        data-testid=${testid} onClick=${confirm ? () => setAsking(true) : run}>${children}</button>
      ${error && html`<${Message} kind="bad">${error}<//>`}
    </span>`;
}

function Confirm({ question, testid, onYes, onNo }) {
  const yes = useRef(null);
  useEffect(() => yes.current.focus(), []);
  return html`
    <span class="confirm" role="group" aria-label=${question} onKeyDown=${(event) => event.key === "Escape" && onNo()}>
      <span>${question}</span>
      <button type="button" class="danger" ref=${yes} data-testid=${testid} onClick=${onYes}>Yes</button>
      <button type="button" onClick=${onNo}>No</button>
    </span>`;
}

export function CopyButton({ text, children = "Copy", testid }) {
  const [said, setSaid] = useState("");
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      setSaid("Copied");
    } catch {
      setSaid(copyBySelection(text) ? "Copied" : "Select the text and copy it by hand");
    }
    setTimeout(() => setSaid(""), 2000);
  };
  return html`
    <button type="button" class="copy" data-testid=${testid} onClick=${copy}>${said || children}</button>
    <span class="unseen" role="status">${said}</span>`;
}

// Without TLS, and not on this machine, browsers have no navigator.clipboard.
function copyBySelection(text) {
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "unseen";
  document.body.append(area);
  area.select();
  const isDone = document.execCommand("copy");
  area.remove();
  return isDone;
}

// {data, error, isLoading, reload}: GET `path`, again when path or params change, and every `everyS` seconds if given.
export function useGet(path, params = {}, everyS = null) {
  const [state, setState] = useState({ data: null, error: null, isLoading: true });
  const asked = useRef(0);
  const key = JSON.stringify(params);
  const reload = useCallback(async () => {
    if (path === null) return;
    const number = (asked.current += 1);
    try {
      const data = await get(path, JSON.parse(key));
      if (number === asked.current) setState({ data, error: null, isLoading: false });
    } catch (problem) {
      if (number === asked.current) setState((before) => ({ ...before, error: inWords(problem), isLoading: false }));
    }
  }, [path, key]);
  useEffect(() => {
    setState((before) => ({ ...before, isLoading: true }));
    reload();
    const timer = everyS && setInterval(() => document.hidden || reload(), everyS * 1000);
    return () => {
      asked.current += 1; // answers that come later are of another question
      clearInterval(timer);
    };
  }, [reload, everyS]);
  return { ...state, reload };
}

export function inWords(problem) {
  if (problem instanceof ApiError) return problem.message;
  console.error(problem);
  return `This page made a mistake: ${problem.message}`;
}

function useMounted() {
  const isMounted = useRef(true);
  useEffect(() => () => {
    isMounted.current = false;
  }, []);
  return isMounted;
}

export const READ_ONLY = "This key may only read. Sign in with a key of scope admin to change anything.";
const NO_KEYS = "This server has no keys, so it cannot be managed: start it with --admin-key KEY.";

// Why the reader cannot change anything here, or null if they can.
export function whyReadOnly(session) {
  if (session.can_admin) return null;
  return session.key ? READ_ONLY : NO_KEYS;
}
