"""Every number of a level's report against a second implementation, written here from the definitions in docs/benchmarking.md.

It is slow and plain on purpose: one request at a time, percentiles by walking along the sorted values, nothing shared with
`bench/measure.py` and `bench/slo.py`.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonle.bench.measure import Circumstances, LevelReport, Sample, report_level
from tonle.bench.slo import METRICS, Bound, Slo

FAILURES = ("timeout: no full answer in 3 s", "HTTP 503: busy, id a1", "HTTP 503: busy, id b2", "connection refused")
gaps_s = st.lists(st.integers(0, 400), max_size=6).map(lambda steps: [step / 1000 for step in steps])


@st.composite
def requests(draw: st.DrawFn, index: int) -> Sample:
    """Moments in whole milliseconds, so that both sides add up the same."""
    start_s = draw(st.integers(0, 4000)) / 1000
    due_s = draw(st.one_of(st.none(), st.integers(0, 300).map(lambda late: start_s - late / 1000)))
    now_s, arrivals_s = start_s + draw(st.integers(1, 500)) / 1000, []
    if draw(st.integers(0, 5)):
        arrivals_s.append(now_s)
        for gap_s in draw(gaps_s):
            now_s += gap_s
            arrivals_s.append(now_s)
    last_s = draw(st.one_of(st.none(), st.integers(0, 50).map(lambda more: now_s + more / 1000)))
    failure = (
        draw(st.sampled_from((None, None, None, *FAILURES))) if last_s is not None else draw(st.sampled_from(FAILURES))
    )
    return Sample(
        index=index, start_s=start_s, due_s=due_s, end_s=now_s + draw(st.integers(0, 100)) / 1000, arrivals_s=arrivals_s,
        last_s=last_s, output_tokens=draw(st.integers(0, 12)), prompt_tokens=draw(st.one_of(st.none(), st.integers(1, 99))),
        cached_tokens=draw(st.one_of(st.none(), st.integers(0, 9))), graphemes=draw(st.one_of(st.none(), st.integers(0, 40))),
        failure=failure,
    )  # fmt: skip


@st.composite
def levels(draw: st.DrawFn) -> list[Sample]:
    return [draw(requests(index)) for index in range(draw(st.integers(1, 9)))]


bounds = st.builds(Bound, st.sampled_from(METRICS), st.sampled_from((50.0, 90.0, 95.0, 99.0, 100.0)),
                   st.integers(1, 900).map(float))  # fmt: skip
slos = st.lists(bounds, min_size=1, max_size=3).map(lambda found: Slo(tuple(found)))


# ---- the second implementation


def begin(sample: Sample) -> float:
    return sample.due_s if sample.due_s is not None else sample.start_s


def values(sample: Sample, metric: str) -> list[float]:
    """Milliseconds: none, one, or for ITL any number."""
    total = None if sample.last_s is None else 1000 * (sample.last_s - begin(sample))
    first = None
    if len(sample.arrivals_s) > 0:
        first = 1000 * (sample.arrivals_s[0] - begin(sample))
    elif sample.output_tokens > 0:
        first = total
    if metric == "ttft":
        return [] if first is None else [first]
    if metric == "e2el":
        return [] if total is None else [total]
    if metric == "tpot":
        if first is None or total is None or sample.output_tokens <= 1:
            return []
        return [(total - first) / (sample.output_tokens - 1)]
    moments = sample.arrivals_s
    return [1000 * (moments[place] - moments[place - 1]) for place in range(1, len(moments))]


def naive_percentile(found: list[float], percent: float) -> float:
    """Walk `percent` of the way along the sorted values, in exact arithmetic."""
    ordered = sorted(found)
    way = Fraction(percent) / 100 * (len(ordered) - 1)
    step = int(way)
    if step == len(ordered) - 1:
        return ordered[-1]
    return ordered[step] + float(way - step) * (ordered[step + 1] - ordered[step])


def keeps(sample: Sample, slo: Slo) -> bool:
    for bound in slo.bounds:
        mine = values(sample, bound.metric)
        if mine and naive_percentile(mine, bound.percent) > bound.limit_ms:
            return False
    return True


def holds(samples: list[Sample], bound: Bound) -> tuple[float | None, bool]:
    """The value over all requests, and whether it is within the limit. A failed request has the worst latency there is."""
    found = [each for sample in samples if sample.failure is None for each in values(sample, bound.metric)]
    lost = sum(sample.failure is not None for sample in samples)
    if bound.metric in ("ttft", "e2el"):
        found += [1e15] * lost
    if not found:
        return None, lost == 0
    value = naive_percentile(found, bound.percent)
    return (None, False) if value > 1e12 else (value, value <= bound.limit_ms)


def near_a_limit(samples: list[Sample], slo: Slo) -> bool:
    """The two implementations may round to different sides of a limit."""
    for bound in slo.bounds:
        every = [holds(samples, bound)[0]]
        every += [naive_percentile(mine, bound.percent) for sample in samples if (mine := values(sample, bound.metric))]
        if any(each is not None and abs(each - bound.limit_ms) < 1e-6 for each in every):
            return True
    return False


def total(samples: list[Sample], field: str) -> int | None:
    found = [getattr(sample, field) for sample in samples if getattr(sample, field) is not None]
    return sum(found) if found else None


def report(samples: list[Sample], **changes: Any) -> LevelReport:
    return report_level(samples, Circumstances(label="x", **changes), keep_rows=True)


# ---- the comparisons

exactly = settings(max_examples=60, deadline=None)


@exactly
@given(levels())
def test_latencies_and_percentiles(samples: list[Sample]) -> None:
    level = report(samples)
    for metric in METRICS:
        found = [each for sample in samples if sample.failure is None for each in values(sample, metric)]
        spread = getattr(level, f"{metric}_ms")
        if not found:
            assert spread is None
            continue
        assert spread.count == len(found)
        assert spread.mean == pytest.approx(sum(found) / len(found), abs=1e-6)
        assert (spread.min, spread.max) == (pytest.approx(min(found), abs=1e-6), pytest.approx(max(found), abs=1e-6))
        for percent in (50, 90, 95, 99):
            assert getattr(spread, f"p{percent}") == pytest.approx(naive_percentile(found, percent), abs=1e-6)


@exactly
@given(levels())
def test_rows_have_the_latencies_of_their_requests(samples: list[Sample]) -> None:
    rows = report(samples).rows or []
    first = min(begin(sample) for sample in samples)
    for sample, row in zip(samples, rows, strict=True):
        assert row.start_s == pytest.approx(begin(sample) - first, abs=1e-6)
        assert row.itl_ms == pytest.approx(values(sample, "itl"), abs=1e-3)
        for metric in ("ttft", "tpot", "e2el"):
            mine = values(sample, metric)
            assert getattr(row, f"{metric}_ms") == (pytest.approx(mine[0], abs=1e-3) if mine else None)
        if sample.due_s is None:
            assert row.delay_ms is None
        else:
            assert row.delay_ms == pytest.approx(1000 * (sample.start_s - sample.due_s), abs=1e-3)


@exactly
@given(levels())
def test_duration_throughput_failures_and_graphemes(samples: list[Sample]) -> None:
    level = report(samples)
    good = [sample for sample in samples if sample.failure is None]
    first, last = min(begin(sample) for sample in samples), max(sample.end_s for sample in samples)
    seconds = last - first
    assert level.duration_s == pytest.approx(seconds, abs=1e-9)
    assert (level.requests, level.succeeded, level.failed) == (len(samples), len(good), len(samples) - len(good))
    assert level.requests_per_s == pytest.approx(len(good) / seconds)
    output = sum(sample.output_tokens for sample in good)
    assert level.output_tokens == output
    assert level.output_tokens_per_s == pytest.approx(output / seconds)
    assert level.prompt_tokens == total(good, "prompt_tokens")
    assert level.cached_tokens == total(good, "cached_tokens")
    assert level.total_tokens_per_s == pytest.approx((output + (total(good, "prompt_tokens") or 0)) / seconds)
    letters = total(good, "graphemes")
    assert level.graphemes_per_s == (None if letters is None else pytest.approx(letters / seconds))
    paces = []
    for sample in good:
        first, end = values(sample, "ttft"), values(sample, "e2el")
        if first and end and sample.graphemes is not None and sample.graphemes > 1:
            paces.append((end[0] - first[0]) / (sample.graphemes - 1))
    if paces:
        assert level.ms_per_grapheme is not None and level.ms_per_grapheme.count == len(paces)
        assert level.ms_per_grapheme.p50 == pytest.approx(naive_percentile(paces, 50), abs=1e-6)
    else:
        assert level.ms_per_grapheme is None
    late = [1000 * (sample.start_s - sample.due_s) for sample in samples if sample.due_s is not None]
    assert level.max_send_delay_ms == (pytest.approx(max(late), abs=1e-6) if late else None)
    # Both of the ids are one group.
    kinds = Counter("busy" if "busy" in sample.failure else sample.failure for sample in samples if sample.failure)
    assert sorted(group.count for group in level.failures) == sorted(kinds.values())
    assert [group.count for group in level.failures] == sorted((group.count for group in level.failures), reverse=True)


@exactly
@given(levels(), slos)
def test_verdicts_goodput_and_good_share(samples: list[Sample], slo: Slo) -> None:
    if near_a_limit(samples, slo):
        return
    level = report(samples, slo=slo)
    for result, bound in zip(level.slo, slo.bounds, strict=True):
        value, held = holds(samples, bound)
        assert result.bound == bound
        assert result.value_ms == (None if value is None else pytest.approx(value, abs=1e-6))
        assert result.holds is held
    good = sum(sample.failure is None and keeps(sample, slo) for sample in samples)
    assert level.good_share == pytest.approx(good / len(samples))
    assert level.goodput_per_s == pytest.approx(good / level.duration_s)
    for sample, row in zip(samples, level.rows or [], strict=True):
        assert row.good is (None if sample.failure is not None else keeps(sample, slo))
    if good == len(samples) and not any(bound.metric == "itl" for bound in slo.bounds):
        assert all(result.holds for result in level.slo), "requests that all keep every limit hold the SLO"
