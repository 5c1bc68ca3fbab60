"""`simulate`: a trace over a fleet, to its end.

Does: run a `Cluster` and gather what came of it. Does not: make traces (`traces.py`), or search for replicas (`levels.py`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from tonle.simulate.cluster import Cluster
from tonle.simulate.fleet import Autoscaling, Failure, Fleet, ReplicaOptions, fleet_of
from tonle.simulate.result import ReplicaReport, SimulationResult
from tonle.simulate.trace import Trace

__all__ = [
    "Autoscaling",
    "Failure",
    "Fleet",
    "ReplicaOptions",
    "ReplicaReport",
    "SimulationResult",
    "fleet_of",
    "simulate",
]


def simulate(trace: Trace, fleet: Fleet, *, seed: int = 0, skip: bool = True) -> SimulationResult:
    """Raises `ConfigError` if the fleet makes no sense. `seed`: of the scatter of step times. `skip`: see `skipping.py`; the
    result is the same without, and comes later."""
    began_s = perf_counter()
    cluster = Cluster(fleet, trace, seed=seed, skip=skip)
    with _no_collection():
        cluster.run()
    samples = sorted(cluster.samples, key=lambda sample: sample.index)
    end_s = max((sample.end_s for sample in samples), default=0.0)
    return SimulationResult(
        label=trace.label,
        users=trace.users,
        rate=_rate(trace) if trace.rate is None else trace.rate,
        samples=samples,
        replicas=[server.report(end_s) for server in cluster.servers],
        counts=cluster.counts,
        duration_s=end_s,
        wall_s=perf_counter() - began_s,
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without the collector of reference cycles: a simulation makes millions of objects and few cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _rate(trace: Trace) -> float | None:
    """Requests per second that arrive, if they do by themselves."""
    moments = [request.arrival_s for request in trace.requests if request.arrival_s is not None]
    span_s = max(moments) - min(moments) if moments else 0.0
    return (len(moments) - 1) / span_s if span_s > 0 else None
