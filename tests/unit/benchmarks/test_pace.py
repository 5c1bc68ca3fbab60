"""The share of the time in which a machine was slow."""

from __future__ import annotations

import time

import pytest
from benchmarks.pace import Pace, slow_share


def _samples(slow_from: int, slow_until: int, count: int = 400) -> list[tuple[float, float]]:
    """20 per second, of 60 microseconds, and 90 while the machine is slow; every seventh is held up."""
    return [
        (place / 20, (9e-5 if slow_from <= place < slow_until else 6e-5) * (3 if place % 7 == 0 else 1))
        for place in range(count)
    ]


@pytest.mark.parametrize(
    ("since_s", "share"),
    [(0.0, 0.25), (5.0, 1 / 3), (10.0, 0.5), (15.0, 0.0)],
)
def test_the_share_is_of_the_time_since(since_s: float, share: float) -> None:
    assert slow_share(_samples(200, 300), since_s) == pytest.approx(share, abs=0.02)


def test_samples_that_were_held_up_do_not_make_a_machine_slow() -> None:
    assert slow_share(_samples(0, 0), 0.0) == 0.0


def test_a_machine_that_is_slow_for_most_of_the_time_is_measured_by_the_rest() -> None:
    assert slow_share(_samples(120, 400), 0.0) == pytest.approx(0.7, abs=0.02)


def test_it_samples_this_machine_and_cleans_up() -> None:
    until_s = time.monotonic() + 120
    with Pace() as pace:
        while len(pace.samples()) < 25 and time.monotonic() < until_s:
            time.sleep(0.01)
        samples = pace.samples()
        assert len(samples) >= 25 and 0.0 <= pace.slow_share(0.0) <= 1.0
        assert all(took_s > 0 for _, took_s in samples)
    assert not pace.path.exists()
