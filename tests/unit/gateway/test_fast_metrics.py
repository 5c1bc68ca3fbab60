"""The gateway's own counters say the same as the client library's."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from tonle.gateway.fast_metrics import FastCounter, FastHistogram

BOUNDS = (0.005, 0.1, 1.0, 60.0)


def text(registry: CollectorRegistry) -> list[str]:
    """What is scraped, without the moments at which the library's metrics were made."""
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_they_read_as_the_librarys_do() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally, spread = FastCounter("calls", "How many.", ("status",)), FastHistogram("wait", "How long.", BOUNDS)
    ours.register(tally)
    ours.register(spread)
    counter = Counter("calls", "How many.", ("status",), registry=theirs)
    histogram = Histogram("wait", "How long.", registry=theirs, buckets=BOUNDS)
    chance = random.Random(1)
    for value in [*BOUNDS, 0.0, 1000.0, *(chance.expovariate(1.0) for _ in range(100))]:
        word = "ok" if value < 1 else "failed"
        tally.add(word)
        counter.labels(word).inc()
        spread.observe(value)
        histogram.observe(value)
    assert text(ours) == text(theirs)
    assert 'wait_bucket{le="+Inf"} 106.0' in text(ours)
