"""Intervals of `bench compare`: they hold the truth about as often as they say, and a run is never worse than itself."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.bench.made_reports import made_level, made_report
from tonle.bench.bootstrap import draw_counts, interval, resampled_percentiles, resampled_ratio
from tonle.bench.compare import CompareOptions, compare
from tonle.bench.report import Run

QUICK = CompareOptions(resamples=200, tolerance=0.0, confidence=0.9)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(0, 12), st.integers(0, 10**6))
def test_a_run_is_never_worse_than_itself(seed: int, users: int, failed: int, draw_seed: int) -> None:
    run = Run("same", made_report([made_level(users, seed=seed, failed=failed, requests=24)]))
    options = CompareOptions(resamples=200, tolerance=0.0, confidence=0.9, seed=draw_seed)
    for a, b in (([run], [run]), ([run, run], [run, run])):
        found = compare(a, b, options)
        assert not found.changes("regression") and not found.changes("improvement")
        assert all(change.change == 0 for change in found.levels[0].changes if change.change is not None)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.floats(0.1, 1e3), max_size=5), min_size=1, max_size=6),
    st.sampled_from((0.0, 37.0, 50.0, 95.0, 100.0)),
    st.integers(0, 99),
)
def test_resampled_percentiles_are_those_of_the_drawn_values(
    values: list[list[float]], percent: float, seed: int
) -> None:
    counts = draw_counts(np.random.default_rng(seed), [len(values)], 5)
    found = resampled_percentiles([np.array(each) for each in values], counts, [percent])
    for times, value in zip(counts, found[:, 0], strict=True):
        drawn = [each for mine, count in zip(values, times, strict=True) for _ in range(count) for each in mine]
        if drawn:
            assert value == pytest.approx(np.percentile(drawn, percent))
        else:
            assert np.isnan(value)


def test_many_values_are_merged_and_percentiles_stay() -> None:
    rng = np.random.default_rng(3)
    values = [rng.lognormal(0, 0.6, 100) for _ in range(200)]  # 20,000 gaps
    once = np.ones((1, 200), np.int32)
    found = resampled_percentiles(values, once, [5, 50, 95, 99])[0]
    assert found == pytest.approx(np.percentile(np.concatenate(values), [5, 50, 95, 99]), rel=5e-3)


def test_requests_counted_in_blocks_count_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    values = [rng.lognormal(0, 0.6, 30) for _ in range(100)]
    counts = draw_counts(rng, [100], 20)
    whole = resampled_percentiles(values, counts, [50, 99])
    monkeypatch.setattr("tonle.bench.bootstrap.BLOCK_REQUESTS", 7)
    assert (resampled_percentiles(values, counts, [50, 99]) == whole).all()


def test_runs_of_very_many_requests_are_drawn_less_often() -> None:
    runs = [Run("long", made_report([msgspec.structs.replace(made_level(1, requests=24), requests=60_000)]))]
    assert compare(runs, runs).resamples == 416
    assert "416 resamples" in compare(runs, runs).method


def test_draws_are_as_many_as_there_are_requests() -> None:
    rng = np.random.default_rng(0)
    assert (draw_counts(rng, [7], 50).sum(axis=1) == 7).all()
    two = draw_counts(rng, [7, 5], 50)  # one run of two is drawn, whole
    assert set(two.sum(axis=1)) == {7, 5}
    assert ((two[:, :7].sum(axis=1) == 0) | (two[:, 7:].sum(axis=1) == 0)).all()


# 90 % intervals of 50 requests hold the truth in 88 % of 3,600 trials: the percentile method is a little narrow with few
# requests. With 400 trials the share itself is uncertain by 1.6 %.
ABOUT_90 = (0.84, 0.95)


def share_covered(
    truth: float, *, clusters: int, gaps: int, spread: float, percent: float, by_gap: bool = False, trials: int = 400
) -> float:
    """How often 90 % intervals of B by A hold `truth`. Gaps of one request share a factor."""
    rng = np.random.default_rng(11)
    covered = 0
    for _ in range(trials):
        drawn = []
        for scale in (1.0, truth):
            factors = rng.lognormal(0, spread, clusters)
            values = [scale * factor * rng.lognormal(0, 0.1, gaps) for factor in factors]
            if by_gap:
                values = [np.array([each]) for mine in values for each in mine]
            counts = draw_counts(rng, [len(values)], 200)
            drawn.append(resampled_percentiles(values, counts, [percent])[:, 0])
        low, high = interval(drawn[1] / drawn[0], 0.9) or (0.0, 0.0)
        covered += low <= truth <= high
    return covered / trials


@pytest.mark.parametrize("percent", [50, 95])
def test_intervals_of_requests_cover_the_truth(percent: float) -> None:
    assert ABOUT_90[0] <= share_covered(1.15, clusters=60, gaps=1, spread=0.3, percent=percent) <= ABOUT_90[1]


def test_gaps_are_drawn_by_request() -> None:
    """Drawn one by one, they would promise far more than they know."""
    by_request = share_covered(1.1, clusters=30, gaps=12, spread=0.3, percent=50, trials=200)
    one_by_one = share_covered(1.1, clusters=30, gaps=12, spread=0.3, percent=50, trials=40, by_gap=True)
    assert 0.8 <= by_request <= 0.97
    assert one_by_one < 0.6


def test_intervals_of_rates_cover_the_truth() -> None:
    rng = np.random.default_rng(5)
    covered, trials = 0, 400
    for _ in range(trials):
        drawn = []
        for speed in (1.0, 1.2):
            tokens = rng.integers(20, 80, 50).astype(float)
            seconds = tokens / 50 / speed * rng.lognormal(-0.02, 0.2, 50)
            drawn.append(resampled_ratio(tokens, seconds, draw_counts(rng, [50], 200)))
        low, high = interval(drawn[1] / drawn[0], 0.9) or (0.0, 0.0)
        covered += low <= 1.2 <= high
    assert ABOUT_90[0] <= covered / trials <= ABOUT_90[1]
