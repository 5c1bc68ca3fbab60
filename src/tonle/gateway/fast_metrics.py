"""Counters and histograms for one thread: an addition each, and nothing locked.

Does: count, and export in Prometheus' format when scraped. Does not: name metrics. The client library's own are
thread-safe and cost ten times as much; a gateway counts every request several times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class FastCounter(Collector):
    """How often each combination of labels came."""

    def __init__(self, name: str, help: str, labels: Sequence[str]) -> None:
        self._name, self._help, self._labels = name, help, tuple(labels)
        self._counts: dict[tuple[str, ...], int] = {}

    def add(self, *values: str, count: int = 1) -> None:
        self._counts[values] = self._counts.get(values, 0) + count

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for values, count in self._counts.items():
            family.add_metric(values, count)
        yield family


class FastHistogram(Collector):
    """How many values fell below each bound."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        """`bounds` rise; a last one without bound is added."""
        self._name, self._help, self._bounds = name, help, tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)  # per bucket, not summed up
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1  # a bound belongs to the bucket below it
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        buckets, total = [], 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(self._name, self._help)
        family.add_metric([], buckets, self._sum)
        yield family
