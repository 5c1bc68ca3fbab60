// The arithmetic of charts: ranges, ticks, the newest figure. It draws nothing.

// From zero, with room above; a scale that ends at `max` (1 for shares) never changes.
export function yRange(low, high, max) {
  if (max !== null) return [0, Math.max(max, high ?? 0)];
  return [0, high > 0 ? high * 1.1 : 1];
}

// Some four round steps: 1, 2, 2.5 or 5 times a power of ten (of two, for bytes).
export function yTicks(low, high, unit) {
  const rough = (high - low) / 4;
  if (!(rough > 0)) return [low];
  let step;
  if (unit === "bytes") step = 2 ** Math.ceil(Math.log2(rough));
  else {
    const power = 10 ** Math.floor(Math.log10(rough));
    const steps = unit === "count" ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10];
    step = steps.find((times) => times * power >= rough) * power;
    if (unit === "count") step = Math.max(1, step); // there is no half of a request
  }
  const ticks = [];
  for (let i = Math.ceil(low / step); i * step <= high * 1.0001; i += 1) ticks.push(i * step);
  return ticks;
}

// Which of some places of `px` each have their names below them, `every` px apart at least: the last one always has.
export function labelled(num, px, every) {
  const step = Math.ceil(every / px);
  return Array.from({ length: num }, (_, i) => (num - 1 - i) % step === 0);
}

// How many of the last points are of the last minute; of ranges whose points are longer, a few.
export function pointsOfMinute(t) {
  const step = t.length > 1 ? t[t.length - 1] - t[t.length - 2] : 1;
  return Math.max(3, Math.round(60 / step));
}

// The newest figure among the last ones, or null.
export function lastKnown(values, within) {
  for (let i = values.length - 1; i >= Math.max(0, values.length - within); i -= 1) {
    if (values[i] !== null && values[i] !== undefined) return values[i];
  }
  return null;
}

// Seconds without a figure that a line crosses: some figures are read every five seconds. On long ranges, one point may be missing.
export function bridged(t) {
  const step = t.length > 1 ? t[t.length - 1] - t[t.length - 2] : 1;
  return Math.max(10, 2 * step);
}

// Where a value has none near it on either side: a line of no length.
export function isolated(values, t) {
  const within = bridged(t);
  const known = [];
  values.forEach((value, i) => {
    if (value !== null && value !== undefined) known.push(i);
  });
  const isFar = (i, j) => i === undefined || j === undefined || Math.abs(t[i] - t[j]) > within;
  return known.filter((at, i) => isFar(at, known[i - 1]) && isFar(at, known[i + 1]));
}
