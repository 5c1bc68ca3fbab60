// What pages compute: the list of requests and its filter, places in a waterfall, sums of usage, verdicts, masks.

import assert from "node:assert/strict";
import { test } from "node:test";

import { onTop } from "./static/pages/firing.js";
import { place } from "./static/pages/waterfall.js";
import { maskPattern } from "./static/pages/record_view.js";
import { filtered, MOST_ROWS, MOST_UNKNOWN, NO_FILTER, RequestRows } from "./static/pages/request_rows.js";
import { addUp, byDay, grouped, isoDay, measuresOf, widths } from "./static/pages/usage_sums.js";
import { modelRows } from "./static/pages/model_rows.js";
import { verdictOf } from "./static/pages/targets.js";
import { scale } from "./static/pages/interval_plot.js";
import { verdict } from "./static/pages/experiments.js";

const row = (number, more = {}) => ({ id: `req-${number}`, number, time: number, status: "ok", model: "m", key: "k", key_id: "key-1", backend: "b", ...more });

// A server with requests 1…most; `pages` counts how often it was asked.
function server(most) {
  const log = { rows: Array.from({ length: most }, (_, i) => row(most - i)), pages: 0 };
  log.load = async ({ limit, before }) => {
    log.pages += 1;
    const from = before ? log.rows.findIndex(({ number }) => number === before) + 1 : 0;
    return { requests: log.rows.slice(from, from + limit), kept: log.rows.length, most: MOST_ROWS };
  };
  return log;
}

test("all kept requests are loaded, in pages, newest first", async () => {
  const log = server(1234);
  const list = new RequestRows(log.load);
  await list.fill();
  assert.deepEqual([list.rows.length, list.rows[0].id, list.rows.at(-1).id, log.pages], [1234, "req-1234", "req-1", 3]);
});

test("requests that all have one id are all listed", async () => {
  const log = server(1234);
  for (const one of log.rows) one.id = "same";
  const list = new RequestRows(log.load);
  await list.fill();
  list.take({ t: 1, requests: [row(1235, { id: "same" })] });
  await settled(list);
  assert.deepEqual([list.rows.length, list.rows[0].number, list.rows.at(-1).number, log.pages], [1235, 1235, 1, 4]);
});

test("refusals of unknown callers push no other rows out", async () => {
  const log = server(1);
  const list = new RequestRows(log.load);
  await list.fill();
  for (let t = 2; t < 100; t += 1) {
    list.take({ t, requests: Array.from({ length: 99 }, (_, i) => row(t * 100 + i, { key: "", key_id: "", status: "refused" })) });
    await settled(list);
  }
  assert.deepEqual([list.rows.length, list.rows.at(-1).id], [MOST_UNKNOWN + 1, "req-1"]);
});

test("live rows come on top, once, and the oldest go", async () => {
  const log = server(MOST_ROWS);
  const list = new RequestRows(log.load);
  await list.fill();
  list.take({ t: 1, requests: [] });
  await settled(list);
  const pages = log.pages;
  for (let t = 2; t < 4; t += 1) list.take({ t, requests: [row(MOST_ROWS + t)] });
  list.take({ t: 3, requests: [row(MOST_ROWS + 3)] }); // the same event again
  assert.deepEqual([list.rows.length, list.rows[0].id, list.rows.at(-1).id], [MOST_ROWS, `req-${MOST_ROWS + 3}`, "req-3"]);
  assert.equal(log.pages, pages);
});

test("a gap is filled from the server, with as few pages as it takes", async () => {
  const log = server(2000);
  const list = new RequestRows(log.load);
  list.take({ t: 1, requests: [] });
  await settled(list);
  log.rows.unshift(...Array.from({ length: 1200 }, (_, i) => row(3200 - i)));
  const pages = log.pages;
  list.take({ t: 40, requests: log.rows.slice(0, 50) });
  await settled(list);
  assert.equal(list.rows.length, 3200);
  assert.equal(log.pages, pages + 3);
});

test("a pause holds the list, and counts what came", async () => {
  const list = new RequestRows(server(3).load);
  await list.fill();
  list.setPaused(true);
  list.take({ t: 1, requests: [row(4), row(5)] });
  await settled(list);
  assert.deepEqual([list.rows.length, list.numWaiting], [3, 2]);
  list.setPaused(false);
  assert.deepEqual([list.rows.length, list.numWaiting], [5, 0]);
});

test("a server that fails is said, what came stays, and the next event tries again", async () => {
  const log = server(3);
  const answers = [async () => { throw new Error("The server cannot be reached."); }, log.load];
  const list = new RequestRows((params) => answers.shift()(params));
  list.take({ t: 1, requests: [row(3)] });
  await settled(list);
  assert.deepEqual([list.rows.length, list.error], [1, "The server cannot be reached."]);
  list.take({ t: 2, requests: [] });
  await settled(list);
  assert.deepEqual([list.rows.length, list.error], [3, null]);
});

async function settled(list) {
  for (let times = 0; list.isLoading && times < 1000; times += 1) await Promise.resolve();
  assert.equal(list.isLoading, false);
}

test("conditions of the filter hold together; text is found in ids and names", () => {
  const rows = [row(1), row(2, { status: "failed", error: "backend_died" }), row(3, { model: "River", key: "", key_id: "key-9" })];
  const ids = (filter) => filtered(rows, { ...NO_FILTER, ...filter }).map(({ id }) => id);
  assert.equal(filtered(rows, NO_FILTER), rows);
  assert.deepEqual(ids({ status: "failed" }), ["req-2"]);
  assert.deepEqual(ids({ text: "river" }), ["req-3"]);
  assert.deepEqual(ids({ text: "DIED" }), ["req-2"]);
  assert.deepEqual(ids({ text: "req-1" }), ["req-1"]);
  assert.deepEqual(ids({ key: "key-9" }), ["req-3"]);
  assert.deepEqual(ids({ status: "failed", model: "River" }), []);
});

test("bars of a waterfall follow each other and end with the track", () => {
  const spans = [[0, 0.1], [0.1, 0.3], [0.4, 0.6]].map(([start_s, seconds]) => place({ start_s, seconds }, 1));
  assert.deepEqual(spans.map(({ left }) => Math.round(left)), [0, 10, 40]);
  assert.ok(Math.abs(spans.reduce((sum, { width }) => sum + width, 0) - 100) < 1e-9);
  assert.deepEqual(place({ start_s: 2, seconds: 5 }, 4), { left: 50, width: 50 });
  assert.deepEqual(place({ start_s: 0, seconds: 0 }, 0), { left: 0, width: 0 });
});

const used = (day, key_id, model, requests, cost) => ({ day, key_id, key_name: key_id, model, requests, failed: 0, prompt_tokens: 10, cached_tokens: 1, completion_tokens: 5, device_s: 0.5, cost });

test("usage adds up by key, model and day", () => {
  const rows = [used("2026-01-01", "a", "m", 1, 0.5), used("2026-01-03", "a", "n", 2, null), used("2026-01-03", "b", "m", 4, 0.25)];
  assert.deepEqual(grouped(rows, "key").map(({ key_id, requests, cost }) => [key_id, requests, cost]), [["a", 3, 0.5], ["b", 4, 0.25]]);
  assert.deepEqual(grouped(rows, "model").map(({ model, prompt_tokens }) => [model, prompt_tokens]), [["m", 20], ["n", 10]]);
  assert.equal(grouped(rows, "all").length, 3);
  assert.deepEqual(byDay(rows, "2025-12-31", "2026-01-03").map(({ day, requests }) => [day, requests]),
    [["2025-12-31", 0], ["2026-01-01", 1], ["2026-01-02", 0], ["2026-01-03", 6]]);
  assert.equal(addUp(rows).requests, 7);
  assert.equal(addUp([used("2026-01-01", "a", "m", 1, null)]).cost, null);
  assert.equal(isoDay(-1, Date.UTC(2026, 2, 1)), "2026-02-28");
});

test("sound and images have columns where there are any", () => {
  const rows = [used("2026-01-01", "a", "m", 1, 0.5), { ...used("2026-01-01", "a", "asr", 2, null), audio_s: 2.5, characters: 0, images: 0 }];
  const ids = (found) => found.map(({ id }) => id);
  assert.deepEqual(ids(measuresOf([{ ...rows[0], cost: null }], false)),
    ["requests", "failed", "prompt_tokens", "cached_tokens", "completion_tokens", "device_s"]);
  assert.deepEqual(ids(measuresOf(rows, true)).filter((id) => ["audio_s", "characters", "images", "cost"].includes(id)), ["audio_s", "cost"]);
  assert.ok(ids(measuresOf(rows, false)).includes("cost"), "some have a cost, of a price that was set then");
  assert.equal(addUp(rows).audio_s, 2.5);
  const wide = (found, chosen) => Object.fromEntries(widths(found, chosen).map((value, i) => [found[i].id, value]));
  const few = wide(measuresOf(rows.slice(0, 1), true), "completion_tokens");
  assert.deepEqual([few.requests, few.failed, few.completion_tokens, few.cost], [false, true, false, false]);
  const many = wide(measuresOf(rows, true), "audio_s"); // beside sound, less is shown of tokens
  assert.deepEqual([many.failed, many.cached_tokens, many.completion_tokens, many.audio_s, many.cost], ["most", "most", true, false, false]);
});

test("a target that holds again is not called missed, nor met before its time", () => {
  const target = (more) => ({ value_s: 1, target_s: 2, meets: true, burn_rate: 0, ...more });
  const words = (...targets) => verdictOf({ meets: targets.every(({ meets }) => meets), targets })[1];
  assert.equal(words(target()), "Targets met");
  assert.equal(words(target(), target({ meets: false, burn_rate: 1.2, value_s: 3 })), "Target missed");
  assert.equal(words(target(), target({ meets: false, burn_rate: 0.8 })), "Target was missed until now");
  assert.equal(words(target({ value_s: 3, burn_rate: 2 })), "Too few requests to judge");
});

test("another name of a model is served by who has the model", () => {
  const backends = [{ name: "a", models: ["m"] }, { name: "b", models: ["m", "n"] }];
  const rows = modelRows([{ id: "m", root: "m" }, { id: "public", root: "m" }, { id: "gone", root: "gone" }], [], backends);
  assert.deepEqual(rows.map((row) => row.backends), [["a", "b"], ["a", "b"], []]);
});

test("a comparison says what may be said", () => {
  const said = (more) => verdict({ measure: "latency_ms", p_value: 0.001, significant: true, difference: -5, interval: [-8, -2], ...more }).text;
  assert.equal(said({ p_value: null, interval: null }), "too few to tell");
  assert.equal(said({ measure: "failure_rate", p_value: null, significant: false, difference: 0, interval: [-0.01, 0.01] }), "no clear difference"); // none failed
  assert.equal(said({ significant: false }), "no clear difference");
  assert.equal(said({}), "better");
  assert.equal(said({ difference: 5 }), "worse");
  assert.equal(said({ measure: "output_tokens" }), "lower");
});

test("intervals share one scale around zero", () => {
  const x = scale([{ value: 2, interval: [-1, 4] }], false);
  assert.ok(x(-1) < x(0) && x(0) < x(2) && x(2) < x(4));
  assert.equal(x(0), (x(-4) + x(4)) / 2);
});

test("masks are found in texts, also those with names of their own", () => {
  const parts = "to [email], staff [badge.no] and [other]".split(maskPattern({ "badge.no": 1, "omitted output": 1 }));
  assert.deepEqual(parts, ["to ", "[email]", ", staff ", "[badge.no]", " and [other]"]);
});

test("what fires is shown on top, of many backends the newest, a missed target in its own card", () => {
  const alert = (time, kind, subject) => ({ time, kind, subject, state: "firing", summary: "" });
  const { shown, numMore } = onTop([alert(4, "sla", "ttft"), alert(3, "backend", "a"), alert(1, "audit", "writing")]);
  assert.deepEqual([shown.map((each) => each.subject), numMore], [["writing", "a"], 0]);
  const many = onTop([...Array.from({ length: 30 }, (_, i) => alert(30 - i, "backend", `b${30 - i}`)), alert(0, "audit", "writing")]);
  assert.deepEqual([many.shown[0].subject, many.shown[1].subject, many.shown.length + many.numMore], ["writing", "b30", 31]);
  assert.ok(many.numMore > 0);
  assert.deepEqual(onTop(undefined), { shown: [], numMore: 0 });
});
