"""Statistics against values worked out elsewhere (tables of Student's t and of the normal distribution)."""

from __future__ import annotations

import random
import statistics

import pytest

from tonle.gateway.comparison import (
    ArmResult,
    Moments,
    compare,
    gather,
    newcombe,
    two_proportions,
    welch,
    welch_interval,
    wilson,
)
from tonle.gateway.distributions import incomplete_beta, t_quantile


def test_two_proportions_against_a_table() -> None:
    # z = 1.96 gives p = 0.05
    assert two_proportions(50, 1000, 70, 1000) == pytest.approx(0.0597, abs=1e-3)
    assert two_proportions(0, 10, 0, 10) is None
    assert two_proportions(0, 0, 1, 10) is None


@pytest.mark.parametrize(
    ("t", "freedom", "p"), [(2.228, 10, 0.05), (12.706, 1, 0.05), (2.750, 30, 0.01), (0.0, 5, 1.0)]
)
def test_students_t_against_a_table(t: float, freedom: float, p: float) -> None:
    assert incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t)) == pytest.approx(p, rel=2e-3)


def test_welch_sees_a_difference_and_no_difference() -> None:
    rng = random.Random(3)
    slow = [rng.gauss(110, 10) for _ in range(200)]
    fast = [rng.gauss(100, 20) for _ in range(200)]
    same = [rng.gauss(100, 20) for _ in range(200)]
    different, alike = p_of(slow, fast), p_of(fast, same)
    assert different is not None and different < 1e-6
    assert alike is not None and alike > 0.01
    assert p_of([1.0], [2.0, 3.0]) is None and p_of([1.0, 1.0], [1.0, 1.0]) is None


def p_of(a: list[float], b: list[float]) -> float | None:
    return welch(Moments.of(a), Moments.of(b))


def test_under_no_difference_p_is_uniform() -> None:
    rng = random.Random(11)
    found = [p_of([rng.gauss(0, 1) for _ in range(12)], [rng.gauss(0, 3) for _ in range(20)]) for _ in range(2000)]
    below = sum(p is not None and p < 0.05 for p in found)
    assert 70 < below < 130


@pytest.mark.parametrize(
    ("p", "freedom", "t"), [(0.975, 10, 2.2281), (0.975, 1, 12.7062), (0.995, 30, 2.7500), (0.975, 1e6, 1.96)]
)
def test_quantiles_of_students_t_against_a_table(p: float, freedom: float, t: float) -> None:
    assert t_quantile(p, freedom) == pytest.approx(t, rel=1e-3)


def test_moments_are_those_of_the_values() -> None:
    rng = random.Random(7)
    values = [1e6 + rng.gauss(0, 1) for _ in range(500)]
    found = Moments.of(values)
    assert found.mean == pytest.approx(statistics.fmean(values), rel=1e-12)
    assert found.error * 500 == pytest.approx(statistics.variance(values), rel=1e-9)


def test_intervals_of_rates_against_newcombes_paper() -> None:
    """Newcombe 1998: interval estimation for the difference between independent proportions, table II, method 10."""
    for a, b, low, high in (((48, 80), (56, 70), 0.0524, 0.3339), ((3, 10), (9, 10), 0.1705, 0.8090),
                            ((0, 10), (10, 10), 0.6075, 1.0), ((0, 20), (0, 10), -0.1611, 0.2775)):  # fmt: skip
        found = newcombe(*a, *b)
        assert found is not None and found == pytest.approx((low, high), abs=1e-4)
    assert newcombe(0, 0, 1, 10) is None and wilson(0, 0) is None
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)  # Newcombe 1998, of one rate
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)


def test_the_interval_of_means_agrees_with_the_test_and_covers_the_truth() -> None:
    rng = random.Random(13)
    num_covered = 0
    for _ in range(1000):
        a, b = Moments.of(rng.gauss(10, 2) for _ in range(8)), Moments.of(rng.gauss(11, 5) for _ in range(15))
        low, high = welch_interval(a, b) or pytest.fail("no interval")
        p_value = welch(a, b)
        assert p_value is not None and (p_value < 0.05) == (low > 0 or high < 0)
        num_covered += low <= 1 <= high
    assert 925 < num_covered < 975
    assert welch_interval(Moments.of([1.0]), Moments.of([1.0, 2.0])) is None


def record(arm: str, total_ms: float, status: str = "ok") -> dict[str, object]:
    return {"experiment": {"name": "e", "arm": arm}, "status": status, "latency_ms": {"total": total_ms},
            "usage": {"completion_tokens": 5}}  # fmt: skip


def test_arms_are_gathered_and_compared() -> None:
    rng = random.Random(5)
    records = [record("a", rng.gauss(100, 5)) for _ in range(60)] + [record("b", rng.gauss(140, 5)) for _ in range(60)]
    records += [record("b", 1, "failed") for _ in range(30)]
    records += [record("a", 1, "cached"), {"status": "ok", "experiment": None, "latency_ms": {}}]
    arms = gather(records, "e")
    assert (arms["a"].num_requests, arms["b"].num_requests, arms["b"].num_failed) == (60, 90, 30)
    found = {each.measure: each for each in compare(arms, "a")}
    assert found["latency_ms"].significant and found["latency_ms"].value > found["latency_ms"].control
    assert found["failure_rate"].significant
    low, high = found["latency_ms"].interval or pytest.fail("no interval")
    assert 30 < low < found["latency_ms"].difference < high < 50
    assert not found["output_tokens"].significant


def test_an_arm_without_requests_has_nothing_to_compare() -> None:
    arms = gather([record("a", 100), record("a", 110)], "e") | {"b": ArmResult("b")}
    assert compare(arms, "a") == compare(arms, "b") == []
