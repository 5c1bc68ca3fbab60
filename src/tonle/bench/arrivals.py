"""When the requests of an open loop are due.

Does: draw moments from a seed: evenly spaced, a Poisson process, or gamma gaps that come in bursts; at one rate or at a rate that
rises. Does not: wait or send. A simulated run with the same load, seed and level gets the same moments.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

from tonle.bench.load import Load


def arrival_times(load: Load, *, seed: int, level: int = 0, duration_s: float | None = None) -> Iterator[float]:
    """Seconds after the level's begin, upwards from 0: without end, or all before `duration_s`. A ramp needs a duration."""
    gap = _unit_gaps(load, random.Random(f"{seed}/{level}/arrivals"))
    moment = _moments(load, duration_s)
    arrivals = 0.0  # that a process of this rate is expected to have had by then
    while True:
        offset_s = moment(arrivals)
        if duration_s is not None and offset_s >= duration_s:
            return
        yield offset_s
        arrivals += gap()


def _unit_gaps(load: Load, rng: random.Random) -> Callable[[], float]:
    """Gaps with a mean of 1."""
    if load.arrivals == "constant":
        return lambda: 1.0
    if load.arrivals == "gamma":
        return lambda: rng.gammavariate(load.burstiness, 1 / load.burstiness)
    return lambda: rng.expovariate(1.0)


def _moments(load: Load, duration_s: float | None) -> Callable[[float], float]:
    """Number of expected arrivals -> the moment by which they are expected: stretches unit gaps to the rate of that time."""
    begin = load.value
    if load.to is None:
        return lambda arrivals: arrivals / begin
    if duration_s is None:
        raise ValueError("a ramp takes its time from the duration")
    slope = (load.to - begin) / duration_s  # requests per second, per second
    if slope == 0:
        return lambda arrivals: arrivals / begin

    def moment(arrivals: float) -> float:
        """Solves begin·t + slope·t²/2 = arrivals."""
        square = begin * begin + 2 * slope * arrivals
        if square < 0:  # a falling rate reaches zero before that many have come
            return math.inf
        return 2 * arrivals / (begin + math.sqrt(square)) if arrivals else 0.0

    return moment
