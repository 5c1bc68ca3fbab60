// The stream of live figures: one connection for the whole page, one update of all components per event.
//
//   const { event, state } = useLive();        // renders again each second while the component is on the page
//   live.ring.columns(["ttft_p95"])             // the last five minutes, as charts.js takes them

import { get } from "./api.js";
import { useEffect, useState } from "./html.js";
import { Ring } from "./ring.js";

export const LIVE_SECONDS = 300;
const BACKEND_SECONDS = 120;
const LONGEST_WAIT_S = 15; // between two attempts to connect
const SILENCE_S = 10; // events come each second: after this long without one the connection is taken for dead

class Live {
  constructor() {
    this.event = null; // the latest "second" event
    this.state = "connecting"; // open, lost
    this.retryAt = null; // unix seconds of the next attempt, while the connection is lost
    this.ring = new Ring(LIVE_SECONDS);
    this.backends = new Map(); // name -> Ring of running, waiting, tokens_per_s, kv_usage
    this._listeners = new Set();
    this._source = null;
    this._attempts = 0;
    this._clockOffset = 0; // the server's clock minus this machine's, seconds
    this._heard = 0;
    this._timer = null;
    this._retry = null;
  }

  // `onNeedsLogin` is called when the server does not know the session any more.
  start(onNeedsLogin) {
    this.stop();
    this._onNeedsLogin = onNeedsLogin;
    this.state = "connecting";
    this._open();
    this._timer = setInterval(() => this._tick(), 1000);
  }

  stop() {
    this._source?.close();
    this._source = null;
    clearInterval(this._timer);
    clearTimeout(this._retry);
    this.event = null;
    this.ring.clear();
    this.backends.clear();
  }

  // Returns the function that ends it.
  listen(callback) {
    this._listeners.add(callback);
    return () => this._listeners.delete(callback);
  }

  now() {
    return Date.now() / 1000 + this._clockOffset;
  }

  _open() {
    this._heard = Date.now();
    const source = (this._source = new EventSource("/dashboard/api/live"));
    source.addEventListener("second", (message) => this._receive(JSON.parse(message.data)));
    source.onerror = () => this._lose(source);
  }

  async _receive(event) {
    this._heard = Date.now();
    this._clockOffset = event.t - Date.now() / 1000;
    const isFirst = this.state !== "open";
    this.event = event;
    this.state = "open";
    this._attempts = 0;
    this.retryAt = null;
    this.ring.push(event.t, event.values);
    this._pushBackends(event);
    if (isFirst) this._loadHistory();
    this._tell();
  }

  // What happened before the page was opened, or while the connection was lost.
  async _loadHistory() {
    try {
      const history = await get("/dashboard/api/history", { range: LIVE_SECONDS });
      this.ring.fill(history.t, history.series);
      this._tell();
    } catch {
      // the chart begins now instead
    }
  }

  _pushBackends(event) {
    const names = new Set();
    for (const backend of event.backends ?? []) {
      names.add(backend.name);
      let ring = this.backends.get(backend.name);
      if (!ring) this.backends.set(backend.name, (ring = new Ring(BACKEND_SECONDS)));
      const state = backend.state ?? {};
      ring.push(event.t, {
        running: state.running ?? backend.running,
        waiting: state.waiting ?? backend.waiting,
        kv_usage: state.kv_usage,
        tokens_per_s: growth(ring, state.generation_tokens, state.at ?? event.t),
      });
    }
    for (const name of this.backends.keys()) if (!names.has(name)) this.backends.delete(name);
  }

  async _lose(source) {
    if (source !== this._source) return;
    source.close();
    this.state = "lost";
    const wait = Math.min(LONGEST_WAIT_S, 2 ** this._attempts++) * (0.75 + Math.random() / 2);
    this.retryAt = Date.now() / 1000 + wait;
    this._tell();
    clearTimeout(this._retry);
    this._retry = setTimeout(() => this._reconnect(source), wait * 1000);
  }

  // An EventSource does not say why it failed, so the session is asked for first.
  async _reconnect(source) {
    if (source !== this._source) return;
    try {
      const session = await get("/dashboard/api/session");
      if (source !== this._source) return;
      if (session.needs_login) this._onNeedsLogin();
      else this._open();
    } catch {
      this._lose(source);
    }
  }

  // Each second without an event is a gap in the charts.
  _tick() {
    if (this.state === "open" && Date.now() - this._heard > SILENCE_S * 1000) this._lose(this._source);
    if (this.state !== "lost") return;
    this.ring.push(this.now(), {});
    this._tell();
  }

  // A page in a background tab keeps its figures, and draws them when it is seen again.
  _tell() {
    if (document.hidden) return;
    for (const callback of this._listeners) callback();
  }
}

// Per second, from a counter. `at` is when the backend was asked: the same twice means no new figure.
function growth(ring, total, at) {
  const before = ring.counter;
  if (total === null || total === undefined) return null;
  if (before && at <= before.at) return before.rate;
  const rate = before && total >= before.total ? (total - before.total) / (at - before.at) : null;
  ring.counter = { total, at, rate };
  return rate;
}

export const live = new Live();
document.addEventListener("visibilitychange", () => live._tell());

export function useLive() {
  const [, update] = useState(0);
  useEffect(() => live.listen(() => update((times) => times + 1)), []);
  return live;
}
