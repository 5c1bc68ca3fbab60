"""The numbers of other kinds of requests against a second implementation, from the definitions in docs/benchmarking.md."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonle.bench.kinds.metrics import METRICS
from tonle.bench.measure import Circumstances, Sample, Spread, report_level


@st.composite
def requests(draw: st.DrawFn, index: int) -> Sample:
    """Moments in whole milliseconds; a quarter fails, and holds numbers that must not count."""
    start_s = draw(st.integers(0, 4000)) / 1000
    end_s = start_s + draw(st.integers(1, 3000)) / 1000
    first_s = draw(st.one_of(st.none(), st.floats(0, 1).map(lambda share: start_s + share * (end_s - start_s))))
    failure = draw(st.sampled_from((None, None, None, "HTTP 503: busy")))
    return Sample(
        index=index, start_s=start_s, end_s=end_s, last_s=end_s, failure=failure,
        due_s=draw(st.one_of(st.none(), st.integers(0, 300).map(lambda late: start_s - late / 1000))),
        arrivals_s=[] if first_s is None else [first_s], items=draw(st.one_of(st.none(), st.integers(0, 9))),
        audio_s=draw(st.one_of(st.none(), st.integers(0, 9000).map(lambda ms: ms / 1000))),
        prompt_tokens=draw(st.one_of(st.none(), st.integers(0, 99))),
    )  # fmt: skip


@st.composite
def levels(draw: st.DrawFn) -> list[Sample]:
    return [draw(requests(index)) for index in range(draw(st.integers(1, 9)))]


def wait_s(sample: Sample) -> float:
    assert sample.last_s is not None
    return sample.last_s - (sample.start_s if sample.due_s is None else sample.due_s)


def walk(found: list[float], percent: int) -> float:
    """Percentile by walking along the sorted values."""
    ordered = sorted(found)
    way = Fraction(percent, 100) * (len(ordered) - 1)
    step = int(way)
    above = ordered[min(step + 1, len(ordered) - 1)]
    return ordered[step] + float(way - step) * (above - ordered[step])


def check_spread(spread: Spread | None, found: list[float]) -> None:
    if not found:
        assert spread is None
        return
    assert spread is not None
    assert spread.count == len(found)
    assert (spread.min, spread.max) == pytest.approx((min(found), max(found)))
    assert spread.mean == pytest.approx(sum(found) / len(found))
    for percent in (50, 90, 95, 99):
        assert getattr(spread, f"p{percent}") == pytest.approx(walk(found, percent))


@settings(max_examples=50, deadline=None)
@given(levels())
def test_every_number_of_a_kind(samples: list[Sample]) -> None:
    level = report_level(samples, Circumstances(label="x", concurrency=2), keep_rows=True)
    good = [sample for sample in samples if sample.failure is None]
    began = min(sample.start_s if sample.due_s is None else sample.due_s for sample in samples)
    took_s = max(sample.end_s for sample in samples) - began

    items = [sample.items for sample in good if sample.items is not None]
    assert level.items == (sum(items) if items else None)
    assert (level.items_per_s is None) == (not items)
    assert (level.items_per_s or 0) == pytest.approx(sum(items) / took_s)
    check_spread(level.s_per_item, [wait_s(sample) / sample.items for sample in good if sample.items])

    sounds = [sample.audio_s for sample in good if sample.audio_s is not None]
    assert (level.audio_s is None) == (not sounds)
    assert (level.audio_s or 0) == pytest.approx(sum(sounds))
    assert (level.audio_s_per_s or 0) == pytest.approx(sum(sounds) / took_s)
    check_spread(level.rtfx, [sample.audio_s / wait_s(sample) for sample in good if sample.audio_s is not None])

    tokens = [sample.prompt_tokens for sample in good if sample.prompt_tokens is not None]
    rate = METRICS["embeddings"].rates[1].of(level)
    assert (rate is None) == (not tokens)
    assert (rate or 0) == pytest.approx(sum(tokens) / took_s)
    check_spread(
        level.ttft_ms,
        [
            1000 * (sample.arrivals_s[0] - (sample.start_s if sample.due_s is None else sample.due_s))
            for sample in good
            if sample.arrivals_s
        ],
    )
    assert level.requests_per_s == pytest.approx(len(good) / took_s)


@settings(max_examples=30, deadline=None)
@given(levels())
def test_rows_give_the_same_as_samples(samples: list[Sample]) -> None:
    """What is compared between runs comes from the rows, whose times are rounded to microseconds."""
    level = report_level(samples, Circumstances(label="x", concurrency=2), keep_rows=True)
    for metrics in METRICS.values():
        for quantity in metrics.quantities:
            found = [value for row in level.rows or [] for value in quantity.values(row)]
            spread = quantity.of(level)
            assert (spread.count if spread else 0) == len(found)
            if spread is not None:
                assert sum(found) / len(found) == pytest.approx(spread.mean, rel=2e-3, abs=2e-3)
        for rate in metrics.rates:
            if rate.of(level) is not None:
                held = [getattr(row, rate.amount) or 0 for row in level.rows or [] if row.failure is None]
                assert sum(held) == pytest.approx(getattr(level, rate.total))
