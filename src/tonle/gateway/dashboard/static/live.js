// The stream of live figures: one connection for the whole page, one update of all components per event.
//
//   const { event, state } = useLive();        // renders again each second while the component is on the page
//   live.ring.columns(["ttft_p95"])             // the last five minutes, as charts.js takes them

import { get } from "./api.js";
import { useEffect, useState } from "./html.js";
import { Ring } from "./ring.js";
import { Tracks } from "./tracks.js";

export const LIVE_SECONDS = 300;
export const TRACK_SECONDS = 120; // what sparklines show
const LONGEST_WAIT_S = 15; // between two attempts to connect
const HIDDEN_S = 60; // a page in the background for longer lets its connection go: browsers allow six per server
const SILENCE_S = 10; // events come each second: after this long without one the connection is taken for dead

class Live {
  constructor() {
    this.event = null; // the latest "second" event
    this.state = "connecting"; // open, lost
    this.retryAt = null; // unix seconds of the next attempt, while the connection is lost
    this.ring = new Ring(LIVE_SECONDS);
    this.version = 0; // grows with every change
    this.backends = new Tracks(TRACK_SECONDS); // by name: running, waiting, kv_usage, tokens_per_s
    this.models = new Tracks(TRACK_SECONDS); // by name: requests that ended
    this.keys = new Tracks(TRACK_SECONDS); // by id: requests that ended
    this._listeners = new Set();
    this._source = null;
    this._attempts = 0;
    this._clockOffset = 0; // the server's clock minus this machine's, seconds
    this._heard = 0;
    this._timer = null;
    this._retry = null;
    this._pause = null;
    document.addEventListener("visibilitychange", () => this._showOrHide());
  }

  // `onNeedsLogin` is called when the server does not know the session any more.
  start(onNeedsLogin) {
    this.stop();
    this._onNeedsLogin = onNeedsLogin;
    this._open();
    this._timer = setInterval(() => this._tick(), 1000);
  }

  stop() {
    this._close();
    clearInterval(this._timer);
    clearTimeout(this._pause);
    this._timer = null;
    this.event = null;
    this.ring.clear();
    for (const tracks of [this.backends, this.models, this.keys]) tracks.clear();
  }

  // Returns the function that ends it.
  listen(callback) {
    this._listeners.add(callback);
    return () => this._listeners.delete(callback);
  }

  now() {
    return Date.now() / 1000 + this._clockOffset;
  }

  _close() {
    this._source?.close();
    this._source = null;
    clearTimeout(this._retry);
    this.state = "connecting";
  }

  _showOrHide() {
    clearTimeout(this._pause);
    if (this._timer === null) return;
    if (document.hidden) this._pause = setTimeout(() => this._close(), HIDDEN_S * 1000);
    else if (this._source === null) this._open();
    this._tell();
  }

  _open() {
    this._heard = Date.now();
    const source = (this._source = new EventSource("/dashboard/api/live"));
    source.addEventListener("second", (message) => this._receive(JSON.parse(message.data)));
    source.onerror = () => this._lose(source);
  }

  _receive(event) {
    this._heard = Date.now();
    this._clockOffset = event.t - Date.now() / 1000;
    const isFirst = this.state !== "open";
    this.event = event;
    this.state = "open";
    this._attempts = 0;
    this.retryAt = null;
    this.ring.push(event.t, event.values);
    this.backends.push(event.t, this._backendFigures(event));
    const ended = event.requests ?? [];
    this.models.push(event.t, countBy(ended, (row) => row.model), { requests: 0 });
    this.keys.push(event.t, countBy(ended, (row) => row.key_id), { requests: 0 });
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

  _backendFigures(event) {
    const figures = new Map();
    for (const { name, running, waiting, state } of event.backends ?? []) {
      figures.set(name, {
        running: state?.running ?? running,
        waiting: state?.waiting ?? waiting,
        kv_usage: state?.kv_usage,
        tokens_per_s: this.backends.growth(name, state?.generation_tokens, state?.at ?? event.t),
      });
    }
    return figures;
  }

  _lose(source) {
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
    const isSilent = Date.now() - this._heard > SILENCE_S * 1000;
    if (this._source && this.state !== "lost" && isSilent) this._lose(this._source);
    if (this.state !== "lost") return;
    this.ring.push(this.now(), {});
    this._tell();
  }

  // A page in a background tab keeps its figures, and draws them when it is seen again.
  _tell() {
    this.version += 1;
    if (document.hidden) return;
    for (const callback of this._listeners) callback();
  }
}

function countBy(rows, keyOf) {
  const counts = new Map();
  for (const row of rows) {
    const key = keyOf(row);
    if (key) counts.set(key, { requests: (counts.get(key)?.requests ?? 0) + 1 });
  }
  return counts;
}

export const live = new Live();

export function useLive() {
  const [, update] = useState(0);
  useEffect(() => live.listen(() => update((times) => times + 1)), []);
  return live;
}
