"""Figures of the past against plain models of them: every value kept, every second listed."""

from __future__ import annotations

import copy
import math
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonle.observe import history_file
from tonle.observe.history import History
from tonle.observe.sample import Mean, Sample
from tonle.observe.sketch import Sketch
from tonle.telemetry.percentile import percentile

seconds_s = st.floats(1e-5, 9e5)


def sketch_of(values: list[float]) -> Sketch:
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    return sketch


@given(st.lists(seconds_s, min_size=1, max_size=60), st.floats(0, 100))
def test_a_percentile_is_within_three_percent(values: list[float], percent: float) -> None:
    exact = percentile(sorted(values), percent)
    found = sketch_of(values).percentile(percent)
    assert found is not None and math.isclose(found, exact, rel_tol=0.03)


@given(st.lists(seconds_s, max_size=30), st.lists(seconds_s, max_size=30))
def test_merged_sketches_are_those_of_all_values(left: list[float], right: list[float]) -> None:
    merged, both = sketch_of(left), sketch_of(left + right)
    merged.merge(sketch_of(right))
    assert merged == both and merged.count == len(left) + len(right)
    assert merged.percentiles(50, 95, 99) == [both.percentile(percent) for percent in (50, 95, 99)]
    assert Sketch.from_bytes(merged.to_bytes()) == merged


@pytest.mark.parametrize("odd", [0.0, -1.0, math.nan, math.inf, 1e300, 5e-324])
def test_odd_values_are_counted_too(odd: float) -> None:
    sketch = sketch_of([odd])
    found = sketch.percentile(50)
    assert sketch.count == 1 and found is not None and math.isfinite(found)


def test_an_empty_sketch_has_no_percentiles() -> None:
    assert Sketch().percentile(95) is None and Sketch().percentiles(50, 95) == [None, None]


counts = st.integers(0, 1000)
means = st.builds(lambda total, count: Mean(float(total), count) if count else Mean(), counts, st.integers(0, 5))
sketches = st.lists(st.integers(1, 4000), max_size=5).map(lambda ms: sketch_of([value / 1000 for value in ms]))


def a_value(field: msgspec.structs.FieldInfo) -> st.SearchStrategy[Any]:
    if field.type is Sketch:
        return sketches
    if field.type is Mean:
        return means
    return counts.map(float) if field.type is float else counts  # whole numbers: their sums are exact


samples = st.fixed_dictionaries({
    field.name: a_value(field) for field in msgspec.structs.fields(Sample)
}).map(lambda values: Sample(**values))  # fmt: skip


def merged(*parts: Sample) -> Sample:
    first = copy.deepcopy(parts[0])
    for part in parts[1:]:
        first.merge(part)
    return first


@given(samples, samples, samples)
@settings(max_examples=40)
def test_the_order_of_merging_does_not_matter(a: Sample, b: Sample, c: Sample) -> None:
    before = copy.deepcopy((a, b, c))
    assert merged(a, merged(b, c)) == merged(merged(a, b), c) == merged(c, b, a)
    assert (a, b, c) == before, "only what is merged into changes"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(a), type=Sample) == a


# What happens to a server, in order. Numbers are seconds, or requests in each of them.
runs = st.tuples(st.just("run"), st.integers(1, 150), st.integers(0, 9))
events = st.lists(
    st.one_of(
        runs,
        runs,
        st.tuples(st.just("gap"), st.integers(1, 5000), st.just(0)),
        st.tuples(st.just("save"), st.just(0), st.just(0)),
        st.tuples(st.sampled_from(["restart", "crash"]), st.just(0), st.just(0)),
    ),
    min_size=1,
    max_size=9,
)
MOST = (200, 30, 24)
SHOWN = ((200, 200, 1), (30 * 60, 30, 60), (24 * 3600, 24, 3600))  # range, points, length of one


class Past:
    """A server with a history, beside a list of its seconds."""

    def __init__(self, path: Path) -> None:
        self.path, self.now = path, 1_700_000_000
        self.kept: dict[int, int] = {}  # second -> requests
        self.saved: dict[int, int] = {}
        self.history = self._open()

    def _open(self) -> History:
        history = History(self.path, clock=lambda: self.now, most=MOST)
        history.open()
        assert history.kind == "file"
        return history

    def play(self, what: str, length: int, requests: int) -> None:
        if what == "gap":
            self.now += length
        for _ in range(length if what == "run" else 0):
            sample = Sample(self.now)
            sample.requests = requests
            sample.e2e.add(0.1, requests) if requests else None
            self.history.add(sample)
            self.kept[self.now] = requests
            self.now += 1
        if what in ("save", "restart"):
            assert self.history.save()
            self.saved = dict(self.kept)
        if what in ("restart", "crash"):
            self.history.file.close()  # does not save
            self.kept = dict(self.saved)
            self.history = self._open()

    def check(self) -> None:
        for range_s, points, step in SHOWN:
            shown = self.history.series(range_s, points)
            assert shown["step"] == step and len(shown["t"]) == points
            assert shown["t"][-1] == (self.now - 1) // step * step
            known_at: dict[int, list[int]] = {}
            for second, requests in self.kept.items():
                known_at.setdefault(second // step * step, []).append(requests)
            for t, rate, p50 in zip(
                shown["t"], shown["series"]["requests_per_s"], shown["series"]["e2e_p50"], strict=True
            ):
                known = known_at.get(t, [])
                expected = sum(known) / len(known) if known else None
                assert rate == (None if expected is None else pytest.approx(expected)), (step, t)
                assert (p50 is None) == (not expected)

    def check_sizes(self) -> None:
        self.history.save()
        for table, most in zip(("seconds", "minutes", "hours"), MOST, strict=True):
            query = f"SELECT count(*) FROM {table}"
            assert self.history.file.read(lambda db, query=query: db.execute(query).fetchone()[0], -1) in range(
                most + 1
            )


@given(events)
@settings(max_examples=15, deadline=None)
def test_history_is_what_happened(events: list[tuple[str, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(history_file, "STEADY_S", 0.0)
        past = Past(Path(folder) / "history.db")
        for event in [*events, ("save", 0, 0), ("run", 3, 2)]:
            past.play(*event)
        past.check()
        past.play("restart", 0, 0)
        past.check()
        past.check_sizes()
        past.history.file.close()
