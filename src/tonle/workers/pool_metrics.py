"""Metrics of worker pools, in vLLM's manner: `tonle_worker_…`, one series per pool.

Does: count and observe, read the state of pools when scraped. Does not: use prometheus_client's global registry.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_JOBS = tuple(float(2**exponent) for exponent in range(11))
_LABELS = ("pool", "model_name")

# Why a worker was started again: it died, hung, grew too large, could not start.
RESTARTS = ("died", "hung", "memory", "failed")


class PoolView(Protocol):
    """What is read when scraped."""

    name: str
    model: str

    @property
    def num_waiting(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_ready(self) -> int: ...


class PoolMetrics(Collector):
    """Of all pools of a server. `collect` gives all of it, for the registry of a server that exports more."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._pools: list[PoolView] = []
        self._batch_size = self._histogram("batch_size", "Jobs per batch.", _JOBS)
        self._wait_s = self._histogram("wait_seconds", "Submission of a job to its start in a worker.", _SECONDS)
        self._run_s = self._histogram("run_seconds", "A batch in its worker.", _SECONDS)
        self._jobs = self._counter("jobs", "Jobs by how they ended.", "outcome")
        self._restarts = self._counter("restarts", "Workers that had to be replaced, by reason.", "reason")
        self._refused = self._counter("refused", "Jobs refused because as many waited as may.")

    def add_pool(self, pool: PoolView) -> OnePoolMetrics:
        self._pools.append(pool)
        return OnePoolMetrics(self, pool.name, pool.model)

    def collect(self) -> Iterable[Metric]:
        yield from self.registry.collect()
        yield self._gauge("queue_length", "Jobs that wait.", [pool.num_waiting for pool in self._pools])
        yield self._gauge("running", "Jobs in workers.", [pool.num_running for pool in self._pools])
        yield self._gauge("instances_ready", "Workers that are ready.", [pool.num_ready for pool in self._pools])

    def _gauge(self, name: str, text: str, values: list[int]) -> Metric:
        family = GaugeMetricFamily(f"tonle_worker_{name}", text, labels=_LABELS)
        for pool, value in zip(self._pools, values, strict=True):
            family.add_metric([pool.name, pool.model], value)
        return family

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"tonle_worker_{name}", text, _LABELS, registry=self.registry, buckets=buckets)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"tonle_worker_{name}", text, (*_LABELS, *labels), registry=self.registry)


class OnePoolMetrics:
    """The same of one pool."""

    def __init__(self, all_pools: PoolMetrics, name: str, model: str) -> None:
        labels = (name, model)
        self.batch_size = all_pools._batch_size.labels(*labels)
        self.wait_s = all_pools._wait_s.labels(*labels)
        self.run_s = all_pools._run_s.labels(*labels)
        self.refused = all_pools._refused.labels(*labels)
        # A rate needs the zero before the first event.
        self._restarts = {reason: all_pools._restarts.labels(*labels, reason) for reason in RESTARTS}
        self._jobs = {
            outcome: all_pools._jobs.labels(*labels, outcome) for outcome in ("success", "error", "abort", "timeout")
        }

    def count_restart(self, reason: str) -> None:
        self._restarts[reason].inc()

    def count_job(self, outcome: str) -> None:
        self._jobs[outcome].inc()
