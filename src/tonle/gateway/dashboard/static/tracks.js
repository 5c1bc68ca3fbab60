// The last seconds of each of several things (backends, models, keys), for sparklines. Things that were silent for as long as the
// line is are forgotten, so that memory stays bounded.

import { Ring } from "./ring.js";

const MOST = 500; // things; further ones have no line

export class Tracks {
  constructor(size) {
    this.size = size;
    this.clear();
  }

  clear() {
    this._rings = new Map();
    this._counters = new Map();
  }

  // `figures`: name -> {figure: number}. Names that are missing in it get `missing`.
  push(t, figures, missing = {}) {
    for (const name of figures.keys()) {
      if (!this._rings.has(name) && this._rings.size < MOST) this._rings.set(name, new Ring(this.size));
    }
    for (const [name, ring] of this._rings) {
      ring.push(t, figures.get(name) ?? missing);
      ring.silent = figures.has(name) ? 0 : (ring.silent ?? 0) + 1;
      if (ring.silent > this.size) this._forget(name);
    }
  }

  // The line of one figure, oldest first, as long as `size`; null where it is not known.
  line(name, figure) {
    const known = this._rings.get(name)?.tail(figure) ?? [];
    return [...new Array(this.size - known.length).fill(null), ...known];
  }

  // Per second, from a counter that was read `at`. The same `at` twice means no new reading.
  growth(name, total, at) {
    if (total === null || total === undefined) return null;
    const before = this._counters.get(name);
    if (before && at <= before.at) return before.rate;
    const rate = before && total >= before.total ? (total - before.total) / (at - before.at) : null;
    this._counters.set(name, { total, at, rate });
    return rate;
  }

  _forget(name) {
    this._rings.delete(name);
    this._counters.delete(name);
  }
}
