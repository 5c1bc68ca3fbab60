// Numbers and times as text, with their units. null and undefined (not known, nothing happened) are shown as "–".

export const NONE = "–";

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

// 12,345 · 12.3 · 1.23: three significant digits below 100, whole numbers above.
export function number(value) {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 100 || Number.isInteger(value)) return whole.format(value);
  return size >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export const count = (value) => (known(value) ? whole.format(value) : NONE);

// 1.2 million: for axes and cards, where room is short.
export function short(value) {
  if (!known(value)) return NONE;
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= size) return `${number(value / (unit === "k" ? 1e3 : size))}${unit}`;
  }
  return number(value);
}

// Seconds as a reader would say them: 0.4 ms · 412 ms · 1.18 s · 2 min 5 s · 3 h 20 min · 4 days 2 h.
export function seconds(value) {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0 ms";
  if (size < 0.01) return `${(value * 1e3).toFixed(1)} ms`;
  if (size < 0.9995) return `${Math.round(value * 1e3)} ms`;
  if (size < 60 && Number.isInteger(value)) return `${value} s`;
  if (size < 59.95) return `${size < 10 ? value.toFixed(2) : value.toFixed(1)} s`;
  const total = Math.round(value);
  if (total < 3600) return joined(Math.floor(total / 60), "min", total % 60, "s");
  if (total < 86400) return joined(Math.floor(total / 3600), "h", Math.floor((total % 3600) / 60), "min");
  const days = Math.floor(total / 86400);
  return joined(days, days === 1 ? "day" : "days", Math.floor((total % 86400) / 3600), "h");
}

const joined = (big, bigUnit, small, smallUnit) => `${big} ${bigUnit}${small ? ` ${small} ${smallUnit}` : ""}`;

// A share of 1 as a percentage.
export function percent(value) {
  if (!known(value)) return NONE;
  const hundredths = Math.abs(value) < 0.0005 ? 0 : value * 100;
  const rounded = hundredths.toFixed(hundredths !== 0 && Math.abs(hundredths) < 10 ? 1 : 0);
  return `${rounded} %`;
}

export function bytes(value) {
  if (!known(value)) return NONE;
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (value >= size) return `${number(value / size)} ${unit}`;
  }
  return `${whole.format(value)} B`;
}

// Below 1 three digits that matter, of at most six places. The currency is the one of the setting price_per_hour, which has no name.
export function money(value) {
  if (!known(value)) return NONE;
  if (value === 0) return "0";
  if (Math.abs(value) < 1e-6) return "< 0.000001";
  if (Math.abs(value) >= 1) return value.toFixed(2);
  const places = Math.min(6, 2 - Math.floor(Math.log10(Math.abs(value))));
  return value.toFixed(places).replace(/(\.\d\d\d*?)0+$/, "$1");
}

const two = (value) => String(value).padStart(2, "0");

// Unix seconds in the reader's time zone: 14:02:09.
export function clock(time) {
  if (!known(time)) return NONE;
  const date = new Date(time * 1000);
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

// 2026-11-16 (local).
export function day(time) {
  if (!known(time)) return NONE;
  const date = new Date(time * 1000);
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
}

export const dateTime = (time) => (known(time) ? `${day(time)} ${clock(time)}` : NONE);

export function ago(time, now = Date.now() / 1000) {
  if (!known(time)) return NONE;
  const passed = Math.max(0, now - time);
  return passed < 5 ? "just now" : `${seconds(Math.round(passed))} ago`;
}

// 7.5 and not 7.50: the numbers of an axis have as many digits as each needs.
const bare = (text) => text.replace(/(\.\d*?)0+(\D*)$/, "$1$2").replace(/\.(\D*)$/, "$1");
const tickOf = (show) => (value) => bare(show(value));

const withUnit = (show, unit) => (value) => (known(value) ? show(value) + unit : NONE);

// By the name of a unit: `show` for a value by itself, `tick` for the axis of a chart, where room is short.
export const UNITS = {
  count: { show: count, tick: count },
  per_s: { show: withUnit(number, "/s"), tick: tickOf(number) },
  tokens_per_s: { show: withUnit(number, " tokens/s"), tick: tickOf(short) },
  seconds: { show: seconds, tick: tickOf(seconds) },
  percent: { show: percent, tick: percent },
  bytes: { show: bytes, tick: bytes },
  money: { show: money, tick: tickOf(money) },
};
