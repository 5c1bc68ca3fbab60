"""When a machine was slow, by samples of how fast it computes."""

from __future__ import annotations

import os
import time
from itertools import pairwise

import pytest

from tonle.simulate.pace import Pace, PaceSample, slow_share, spans


def _samples(slow_from: int, slow_until: int, count: int = 400) -> list[PaceSample]:
    """20 per second, of 60 microseconds, and 90 while the machine is slow; every seventh is held up."""
    return [
        PaceSample(place / 20, (9e-5 if slow_from <= place < slow_until else 6e-5) * (3 if place % 7 == 0 else 1))
        for place in range(count)
    ]


@pytest.mark.parametrize(("since_s", "share"), [(0.0, 0.25), (5.0, 1 / 3), (10.0, 0.5), (15.0, 0.0), (99.0, 0.0)])
def test_the_share_is_of_the_time_since(since_s: float, share: float) -> None:
    assert slow_share(list(spans(_samples(200, 300))), since_s) == pytest.approx(share, abs=0.02)


def test_samples_that_were_held_up_do_not_make_a_machine_slow() -> None:
    assert not any(span.is_slow for span in spans(_samples(0, 0)))


def test_a_machine_that_is_slow_for_most_of_the_time_is_measured_by_the_rest() -> None:
    assert slow_share(list(spans(_samples(120, 400))), 0.0) == pytest.approx(0.7, abs=0.02)


def test_spans_follow_each_other() -> None:
    found = list(spans(_samples(100, 200, count=403)))
    assert found[0].begin_s == 0.0 and found[-1].end_s == 402 / 20
    assert all(before.end_s == after.begin_s for before, after in pairwise(found))
    assert [span.begin_s for span in found if span.is_slow] == pytest.approx([5 + place / 4 for place in range(20)])


def test_few_samples_tell_nothing() -> None:
    assert list(spans(_samples(10, 15, count=15))) == []


def test_it_samples_this_machine_and_leaves_nothing_behind() -> None:
    until_s = time.monotonic() + 120
    with Pace() as pace:
        while len(pace.samples()) < 25 and time.monotonic() < until_s:
            time.sleep(0.01)
        samples = pace.samples()
        assert len(samples) >= 25 and pace.spans() and 0.0 <= pace.slow_share(0.0) <= 1.0
        assert all(sample.took_s > 0 for sample in samples)
        assert samples[0].at_s <= time.monotonic()
        assert os.getpgid(pace._process.pid) != os.getpgrp(), "Ctrl-C in a terminal would reach it"
    assert not pace.path.exists() and pace._process.returncode is not None
