"""Statistics against values worked out elsewhere (tables of Student's t and of the normal distribution)."""

from __future__ import annotations

import random

import pytest

from tonle.gateway.comparison import compare, gather, incomplete_beta, two_proportions, welch


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
    different, alike = welch(slow, fast), welch(fast, same)
    assert different is not None and different < 1e-6
    assert alike is not None and alike > 0.01
    assert welch([1.0], [2.0, 3.0]) is None and welch([1.0, 1.0], [1.0, 1.0]) is None


def test_under_no_difference_p_is_uniform() -> None:
    rng = random.Random(11)
    found = [welch([rng.gauss(0, 1) for _ in range(12)], [rng.gauss(0, 3) for _ in range(20)]) for _ in range(2000)]
    below = sum(p is not None and p < 0.05 for p in found)
    assert 70 < below < 130


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
    assert not found["output_tokens"].significant
