// Sums over rows of usage: by key, by model, by day.

// `wide`: as of a table's column. `isMedia`: shown where there is any; beside such columns, those that `makeRoom` need a wide screen.
export const MEASURES = [
  { id: "requests", name: "Requests", unit: "count" },
  { id: "failed", name: "Failed", unit: "count", wide: true, makeRoom: true },
  { id: "prompt_tokens", name: "Prompt tokens", unit: "count", wide: true },
  { id: "cached_tokens", name: "Cached tokens", unit: "count", wide: "most" },
  { id: "completion_tokens", name: "Output tokens", unit: "count", wide: true },
  { id: "audio_s", name: "Sound", unit: "seconds", wide: true, isMedia: true },
  { id: "characters", name: "Characters spoken", unit: "count", wide: "most", isMedia: true },
  { id: "images", name: "Images", unit: "count", wide: true, isMedia: true },
  { id: "device_s", name: "Device time", unit: "seconds", wide: true, makeRoom: true },
  { id: "cost", name: "Cost", unit: "money" },
];

const DAY_MS = 86_400_000;
const MOST_DAYS = 400; // of a chart

// A day of UTC, as the server counts them: `offset` days from today.
export const isoDay = (offset, now = Date.now()) => new Date(now + offset * DAY_MS).toISOString().slice(0, 10);

// The measures that say something of these rows. Some may have a cost though no price is set now: one was.
export const measuresOf = (rows, hasPrice) => {
  const hasCost = hasPrice || rows.some((row) => (row.cost ?? null) !== null);
  return MEASURES.filter((one) => (hasCost || one.id !== "cost") && (!one.isMedia || rows.some((row) => row[one.id])));
};

// `wide` of each column. The one of the chart is always in the table, also on a phone.
export function widths(measures, chosen) {
  const isTight = measures.some((one) => one.isMedia);
  return measures.map((one) => (one.id === chosen ? false : isTight && one.makeRoom ? "most" : (one.wide ?? false)));
}

// One object with the sum of every measure. A cost that is not known (null) adds nothing; if none is known, the sum is null.
export function addUp(rows) {
  const sums = {};
  for (const { id } of MEASURES) {
    const known = rows.map((row) => row[id]).filter((value) => value !== null && value !== undefined);
    sums[id] = known.length || id !== "cost" ? known.reduce((sum, value) => sum + value, 0) : null;
  }
  return sums;
}

const IDS = {
  key: (row) => row.key_id || row.key_name,
  model: (row) => row.model,
  day: (row) => row.day,
  all: (row) => `${row.day}\n${row.key_id}\n${row.model}`,
};

// Rows added up by `group` (key, model, day or all), each with an id and the names of its first row.
export function grouped(rows, group) {
  const groups = new Map();
  for (const row of rows) {
    const id = IDS[group](row);
    if (!groups.has(id)) groups.set(id, []);
    groups.get(id).push(row);
  }
  return [...groups].map(([id, members]) => {
    const { day, key_id, key_name, model } = members.at(-1); // the latest name of a key that was renamed
    return { id, day, key_id, key_name, model, ...addUp(members) };
  });
}

// One entry per day from `from` to `to`, also for days without a request.
export function byDay(rows, from, to) {
  const sums = new Map(grouped(rows, "day").map((row) => [row.day, row]));
  const days = [];
  for (let time = Date.parse(from); time <= Date.parse(to) && days.length < MOST_DAYS; time += DAY_MS) {
    const day = new Date(time).toISOString().slice(0, 10);
    days.push(sums.get(day) ?? { day, ...addUp([]) });
  }
  return days;
}
