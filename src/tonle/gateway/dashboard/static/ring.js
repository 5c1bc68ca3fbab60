// The last N seconds of named figures, in typed arrays of a fixed size: memory does not grow with time.
// NaN in the arrays stands for "not known"; `columns` gives null for it, which charts draw as a gap.

const GAP_S = 2.5; // seconds without a figure that are drawn as a gap

export class Ring {
  constructor(size) {
    this.size = size;
    this.clear();
  }

  clear() {
    this._t = new Float64Array(this.size);
    this._values = new Map(); // name -> Float64Array
    this._next = 0; // where the next figure goes
    this.length = 0;
  }

  get last() {
    return this.length ? this._t[(this._next + this.size - 1) % this.size] : -Infinity;
  }

  // Figures older than the last one are ignored.
  push(t, values) {
    if (t <= this.last) return;
    if (this.length && t - this.last > GAP_S) this._write(this.last + 1, {});
    this._write(t, values);
  }

  // Puts `series` (name -> array, one entry per entry of `t`) in place of everything before the last second.
  fill(t, series) {
    const names = [...new Set([...Object.keys(series), ...this._values.keys()])];
    const rows = this._rows(names).filter((row) => !t.length || row.t > t[t.length - 1]);
    this.clear();
    t.forEach((time, i) => this.push(time, Object.fromEntries(Object.keys(series).map((name) => [name, series[name][i]]))));
    for (const row of rows) this.push(row.t, row.values);
  }

  // {t: [...], series: {name: [...]}}, oldest first.
  columns(names = [...this._values.keys()]) {
    const t = this._tail(this._t, this.length);
    return { t, series: Object.fromEntries(names.map((name) => [name, this.tail(name)])) };
  }

  // The last `count` figures of one name, oldest first.
  tail(name, count = this.length) {
    const wanted = Math.min(count, this.length);
    const values = this._values.get(name);
    return values ? this._tail(values, wanted) : new Array(wanted).fill(null);
  }

  // A plain loop: spreading typed arrays took most of an update's time.
  _tail(array, count) {
    const found = new Array(count);
    let at = (this._next - count + this.size) % this.size;
    for (let i = 0; i < count; i += 1) {
      found[i] = Number.isNaN(array[at]) ? null : array[at];
      at = at + 1 === this.size ? 0 : at + 1;
    }
    return found;
  }

  _rows(names) {
    const { t, series } = this.columns(names);
    return t.map((time, i) => ({ t: time, values: Object.fromEntries(names.map((name) => [name, series[name][i]])) }));
  }

  _write(t, values) {
    const at = this._next;
    this._t[at] = t;
    for (const array of this._values.values()) array[at] = NaN;
    for (const [name, value] of Object.entries(values ?? {})) {
      let array = this._values.get(name);
      if (!array) this._values.set(name, (array = new Float64Array(this.size).fill(NaN)));
      array[at] = value ?? NaN;
    }
    this._next = (at + 1) % this.size;
    this.length = Math.min(this.size, this.length + 1);
  }
}
