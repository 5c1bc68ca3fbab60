// The latest requests, as the page "requests" shows them: loaded in pages at first, then kept up to date by the live stream.
//
// Does: keep as many rows as the server does, fill gaps (a hidden tab, a lost connection, a second with more requests than an event holds),
// pause, filter. Does not: show anything.

import { get } from "../api.js";

export const MOST_ROWS = 5000;
export const MOST_UNKNOWN = 200; // further ones, that were refused before it was known whose they are: they push out no others
const PAGE_ROWS = 500;
const EVENT_ROWS = 100; // an event holds no more: if it is full, some may be missing
const GAP_S = 1.9; // events come each second

export class RequestRows {
  constructor(load = (params) => get("/dashboard/api/requests", params)) {
    this.rows = []; // newest first
    this.kept = 0; // how many the server has
    this.isLoading = false;
    this.error = null;
    this.isPaused = false;
    this.numWaiting = 0; // that came during the pause
    this._load = load;
    this._known = new Map(); // number -> row: callers may choose one id for several requests
    this._lastEvent = null; // its time
    this._isComplete = false; // everything that the server keeps was loaded once
    this._listeners = new Set();
  }

  listen(callback) {
    this._listeners.add(callback);
    return () => this._listeners.delete(callback);
  }

  _tell() {
    for (const callback of this._listeners) callback();
  }

  // Take an event of the live stream. The same event may come twice.
  take(event) {
    if (!event || event.t === this._lastEvent) return;
    const isGap = this._lastEvent === null || event.t - this._lastEvent > GAP_S || event.requests.length >= EVENT_ROWS;
    this._lastEvent = event.t;
    if (isGap) this.fill(); // first: it stops at a page with a row that was known before this event
    this._add(event.requests);
    if (event.requests.length) this._show();
  }

  // Load from the newest request backwards until a page that is known already, or until there are no more.
  async fill() {
    if (this.isLoading) return;
    this.isLoading = true;
    this.error = null;
    this._tell();
    const before = new Set(this._known.keys()); // that were here when it began: the live stream adds some meanwhile
    const wasComplete = this._isComplete;
    try {
      let last;
      for (let loaded = 0; loaded < MOST_ROWS + MOST_UNKNOWN; ) {
        const page = await this._load({ limit: PAGE_ROWS, before: last });
        this.kept = page.kept;
        const { requests } = page;
        this._add(requests);
        loaded += requests.length;
        this._show();
        if (!requests.length || loaded >= page.kept) break;
        if (wasComplete && requests.some((row) => before.has(row.number))) break;
        last = requests.at(-1).number;
      }
      this._isComplete = true;
    } catch (error) {
      this.error = error.message;
      this._isComplete = false;
      this._lastEvent = null; // the next event tries again
    }
    this.isLoading = false;
    this._show();
  }

  _add(rows) {
    for (const row of rows) this._known.set(row.number, row);
  }

  _show() {
    if (this.isPaused) {
      const shown = new Set(this.rows.map((row) => row.number));
      this.numWaiting = [...this._known.keys()].filter((number) => !shown.has(number)).length;
    } else {
      const sorted = [...this._known.values()].sort((a, b) => b.time - a.time);
      this.rows = latest(sorted);
      if (this.rows.length < sorted.length) this._known = new Map(this.rows.map((row) => [row.number, row]));
      this.numWaiting = 0;
    }
    this._tell();
  }

  setPaused(isPaused) {
    this.isPaused = isPaused;
    this._show();
  }
}

function latest(newestFirst) {
  let admitted = 0;
  let unknown = 0;
  return newestFirst.filter((row) => (row.key_id ? (admitted += 1) <= MOST_ROWS : (unknown += 1) <= MOST_UNKNOWN));
}

export const NO_FILTER = { text: "", status: "", model: "", key: "", backend: "" };

// Rows that meet all conditions of the filter. `text` is looked for in every name and id of a row.
export function filtered(rows, filter) {
  const text = filter.text.trim().toLowerCase();
  const { status, model, key, backend } = filter;
  if (!text && !status && !model && !key && !backend) return rows;
  return rows.filter((row) =>
    (!status || row.status === status) &&
    (!model || row.model === model) &&
    (!key || keyOf(row) === key) &&
    (!backend || row.backend === backend) &&
    (!text || words(row).includes(text)));
}

export const keyOf = (row) => row.key || row.key_id || "";

const words = (row) =>
  [row.id, row.path, row.model, row.adapter, row.key, row.key_id, row.backend, row.status, row.error, row.trace_id, row.experiment, row.arm]
    .join("\n")
    .toLowerCase();

// The values that each condition can have: those that appear, in order of the alphabet.
export function choices(rows) {
  const found = { status: new Set(), model: new Set(), key: new Set(), backend: new Set() };
  for (const row of rows) {
    found.status.add(row.status);
    found.model.add(row.model);
    found.key.add(keyOf(row));
    found.backend.add(row.backend);
  }
  return Object.fromEntries(Object.entries(found).map(([name, values]) => [name, [...values].filter(Boolean).sort()]));
}

export const requestRows = new RequestRows();
