"""Moments of an open loop: their mean rate, how unevenly they come, and that a seed fixes them."""

from __future__ import annotations

import itertools
import statistics
from itertools import pairwise

import pytest

from tonle.bench import Load, arrival_times


def times(load: Load, count: int = 4000, **options: float) -> list[float]:
    fields = {"seed": 1} | options
    return list(itertools.islice(arrival_times(load, **fields), count))  # type: ignore[arg-type]


def variation(moments: list[float]) -> float:
    """Standard deviation of the gaps over their mean: 1 for Poisson, 0 for even spacing, 1/√shape for gamma."""
    gaps = [after - before for before, after in pairwise(moments)]
    return statistics.pstdev(gaps) / statistics.fmean(gaps)


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (Load("rate", 50.0), 1.0),
        (Load("rate", 50.0, arrivals="gamma", burstiness=1.0), 1.0),
        (Load("rate", 50.0, arrivals="gamma", burstiness=0.25), 2.0),
        (Load("rate", 50.0, arrivals="gamma", burstiness=4.0), 0.5),
        (Load("rate", 50.0, arrivals="constant"), 0.0),
    ],
)
def test_rate_and_burstiness(load: Load, expected: float) -> None:
    """4,000 gaps: the mean is within four standard errors of 1 / rate."""
    moments = times(load)
    assert moments[0] == 0.0
    assert moments == sorted(moments)
    assert moments[-1] == pytest.approx(4000 / 50, rel=4 * max(expected, 0.01) / 4000**0.5)
    assert variation(moments) == pytest.approx(expected, rel=0.1, abs=1e-6)


def test_the_seed_and_the_level_decide() -> None:
    load = Load("rate", 5.0)
    assert times(load) == times(load)
    assert times(load) != times(load, seed=2)
    assert times(load) != times(load, level=1)


def test_a_duration_ends_them() -> None:
    assert times(Load("rate", 10.0, arrivals="constant"), duration_s=1.0) == pytest.approx([n / 10 for n in range(10)])


@pytest.mark.parametrize(("begin", "end"), [(0.0, 20.0), (10.0, 30.0), (20.0, 20.0), (30.0, 10.0)])
def test_a_ramp_rises_linearly(begin: float, end: float) -> None:
    """Evenly spaced, the number by t is begin·t + (end − begin)·t²/2D."""
    moments = times(Load("ramp", begin, end, arrivals="constant"), duration_s=100.0)
    assert len(moments) == pytest.approx(50 * (begin + end), abs=1)
    for number, moment_s in enumerate(moments):
        assert begin * moment_s + (end - begin) * moment_s**2 / 200 == pytest.approx(number, abs=1e-6)


def test_a_ramp_at_random_has_its_rates() -> None:
    moments = times(Load("ramp", 10.0, 90.0), duration_s=80.0)
    assert len(moments) == pytest.approx(4000, rel=0.07)
    first = sum(moment_s < 40 for moment_s in moments)
    assert first / len(moments) == pytest.approx(30 / 100, abs=0.04)


def test_labels() -> None:
    loads = [
        Load("rate", 2.0, arrivals="constant"),
        Load("rate", 2.0, arrivals="gamma", burstiness=0.5),
        Load("ramp", 1.0, 8.0),
    ]
    assert [load.label for load in loads] == ["rate 2/s, constant", "rate 2/s, gamma 0.5", "ramp 1-8/s"]
    assert [load.rate for load in loads] == [2.0, 2.0, 4.5]
