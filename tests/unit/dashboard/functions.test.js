// Formats, rings, tracks, scales, sorting, addresses: what the pages' figures rest on.

import assert from "node:assert/strict";
import { test } from "node:test";

import { ApiError, get, onLoggedOut, sentence, withParams } from "./static/api.js";
import { bytes, money, number, percent, seconds, short, UNITS } from "./static/format.js";
import { Ring } from "./static/ring.js";
import { parseHash } from "./static/router.js";
import { isolated, labelled, lastKnown, pointsOfMinute, yRange, yTicks } from "./static/scale.js";
import { sortRows } from "./static/table.js";
import { Tracks } from "./static/tracks.js";

test("seconds are said as a reader would", () => {
  const said = [0, 0.0004, 0.412, 0.9996, 1.18, 12.34, 59.97, 125, 3600, 12000, 86400, 180000].map(seconds);
  assert.deepEqual(said, ["0 ms", "0.4 ms", "412 ms", "1.00 s", "1.18 s", "12.3 s", "1 min", "2 min 5 s", "1 h", "3 h 20 min", "1 day", "2 days 2 h"]);
});

test("what is not known is a dash in every unit", () => {
  for (const { show, tick } of Object.values(UNITS)) {
    for (const nothing of [null, undefined, NaN]) assert.deepEqual([show(nothing), tick(nothing)], ["–", "–"]);
  }
});

test("numbers keep three digits", () => {
  assert.deepEqual([number(0), number(1.234), number(12.34), number(1234.5)], ["0", "1.23", "12.3", "1,235"]);
  assert.deepEqual([short(9999), short(12345), short(1.5e6)], ["9,999", "12.3k", "1.50M"]);
  assert.deepEqual([percent(0), percent(0.012), percent(0.5), percent(1)], ["0 %", "1.2 %", "50 %", "100 %"]);
  assert.deepEqual([bytes(512), bytes(3 * 2 ** 30), bytes(1.5 * 2 ** 40)], ["512 B", "3 GiB", "1.50 TiB"]);
  assert.deepEqual([money(0), money(1.5), money(0.00042), money(1e-9)], ["0", "1.50", "0.00042", "< 0.000001"]);
  assert.deepEqual([0.01421, 0.005528, 0.5, 0.125, 0.0000534].map(money), ["0.0142", "0.00553", "0.50", "0.125", "0.000053"]);
});

test("the numbers of an axis have no zeros at their ends", () => {
  assert.deepEqual([0, 2.5, 5, 7.5, 10, 0.25, 1500].map(UNITS.per_s.tick), ["0", "2.5", "5", "7.5", "10", "0.25", "1,500"]);
  assert.deepEqual([2.5, 200, 12500, 20000, 1.5e6].map(UNITS.tokens_per_s.tick), ["2.5", "200", "12.5k", "20k", "1.5M"]);
  assert.deepEqual([0.25, 0.5, 1, 10].map(UNITS.money.tick), ["0.25", "0.5", "1", "10"]);
  assert.deepEqual([0, 0.01, 0.4, 2.5, 5, 125].map(UNITS.seconds.tick), ["0 ms", "10 ms", "400 ms", "2.5 s", "5 s", "2 min 5 s"]);
});

test("a ring keeps the newest, oldest first, and null for what is not known", () => {
  const ring = new Ring(3);
  for (let t = 1; t <= 5; t += 1) ring.push(t, { a: t === 4 ? null : t });
  assert.deepEqual(ring.columns(["a", "b"]), { t: [3, 4, 5], series: { a: [3, null, 5], b: [null, null, null] } });
});

test("a ring takes no figure twice, and shows silence as a gap", () => {
  const ring = new Ring(10);
  ring.push(1, { a: 1 });
  ring.push(1, { a: 7 });
  ring.push(9, { a: 9 });
  assert.deepEqual(ring.columns(["a"]), { t: [1, 2, 9], series: { a: [1, null, 9] } });
});

test("history goes before what the stream brought", () => {
  const ring = new Ring(10);
  ring.push(5, { a: 50 });
  ring.push(6, { a: 60 });
  ring.fill([3, 4, 5], { a: [3, null, 5] });
  assert.deepEqual(ring.columns(["a"]), { t: [3, 4, 5, 6], series: { a: [3, null, 5, 60] } });
});

test("tracks are as long as their line, and silent ones are forgotten", () => {
  const tracks = new Tracks(3);
  tracks.push(1, new Map([["m", { requests: 2 }]]), { requests: 0 });
  tracks.push(2, new Map(), { requests: 0 });
  assert.deepEqual(tracks.line("m", "requests"), [null, 2, 0]);
  for (let t = 3; t < 9; t += 1) tracks.push(t, new Map(), { requests: 0 });
  assert.deepEqual(tracks.line("m", "requests"), [null, null, null]);
});

test("a counter's growth is per second, and starts again with the counter", () => {
  const tracks = new Tracks(3);
  assert.equal(tracks.growth("b", 100, 10), null);
  assert.equal(tracks.growth("b", 150, 15), 10);
  assert.equal(tracks.growth("b", 150, 15), 10); // the same reading again
  assert.equal(tracks.growth("b", 5, 20), null); // the backend was restarted
  assert.equal(tracks.growth("b", null, 25), null);
});

test("the last place is labelled, and as many before it as there is room for", () => {
  const labels = (...how) => labelled(...how).flatMap((has, i) => (has ? [i] : []));
  assert.deepEqual([labels(7, 100, 70), labels(7, 40, 70), labels(30, 8, 70)], [[0, 1, 2, 3, 4, 5, 6], [0, 2, 4, 6], [2, 11, 20, 29]]);
  assert.deepEqual(labels(1, 300, 70), [0]);
});

test("scales begin at zero and have round ticks", () => {
  assert.deepEqual(yRange(null, null, null), [0, 1]);
  assert.deepEqual(yRange(3, 0.5, 1), [0, 1]);
  assert.deepEqual(yTicks(0, 10, "per_s"), [0, 2.5, 5, 7.5, 10]);
  assert.deepEqual(yTicks(0, 10, "count"), [0, 5, 10]);
  assert.deepEqual(yTicks(0, 1.1, "count"), [0, 1]);
  assert.deepEqual(yTicks(0, 3 * 2 ** 30, "bytes"), [0, 2 ** 30, 2 * 2 ** 30, 3 * 2 ** 30]);
});

test("the newest figure is of the last few", () => {
  assert.equal(lastKnown([1, 2, null], 5), 2);
  assert.equal(lastKnown([1, null, null, null], 3), null);
  assert.equal(lastKnown([0], 5), 0);
  assert.deepEqual([pointsOfMinute([1, 2]), pointsOfMinute([0, 120]), pointsOfMinute([])], [60, 3, 60]);
});

test("sorting puts the unknown last in both directions", () => {
  const columns = [{ id: "n", value: (row) => row.n }];
  const rows = [{ n: 2 }, { n: null }, { n: 10 }];
  const sorted = (descending) => sortRows(rows, columns, { id: "n", descending }).map((row) => row.n);
  assert.deepEqual([sorted(false), sorted(true)], [[2, 10, null], [10, 2, null]]);
  assert.equal(sortRows(rows, columns, null), rows);
});

test("an address names the page, what is below it, and parameters", () => {
  const { name, rest, params } = parseHash("#/requests/a%2Fb?status=failed");
  assert.deepEqual([name, rest, params.get("status")], ["requests", ["a/b"], "failed"]);
  assert.equal(parseHash("").name, "overview");
});

test("empty parameters are left out", () => {
  assert.equal(withParams("/p", { a: "", b: null, c: 0, d: "x y" }), "/p?c=0&d=x+y");
  assert.equal(sentence("there is no model"), "There is no model.");
});

test("an error carries the server's words, and 401 means signed out", async () => {
  const body = { error: { message: "this key was revoked", code: "invalid_api_key", param: null } };
  globalThis.fetch = async () => new Response(JSON.stringify(body), { status: 401 });
  let isOut = false;
  const end = onLoggedOut(() => (isOut = true));
  await assert.rejects(get("/x"), (error) => error instanceof ApiError && error.message === "This key was revoked." && error.status === 401);
  assert.equal(isOut, true);
  end();
  globalThis.fetch = async () => {
    throw new TypeError("failed");
  };
  await assert.rejects(get("/x"), (error) => error.status === 0 && error.message.startsWith("The server cannot be reached"));
});

test("a value far from all others is found; a few seconds without one are crossed", () => {
  const t = Array.from({ length: 120 }, (_, second) => second);
  const values = t.map((second) => ([0, 40, 80, 81].includes(second) ? 1 : null));
  assert.deepEqual(isolated(values, t), [0, 40]);
  assert.deepEqual(isolated([1, null, null, 2], [0, 1, 2, 3]), []);
  assert.deepEqual(isolated([null, 5], [0, 1]), [1]);
  assert.deepEqual(isolated([1, null, 1], [0, 3600, 7200]), []); // hours: one may be missing
});
