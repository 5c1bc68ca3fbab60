"""Percentiles, rates and the latency target, on requests whose numbers are known."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tonle.inference_optimizer.breakdown import PARTS, Breakdown
from tonle.inference_optimizer.request_metrics import EndedRequest, Outcome, RequestMetrics
from tonle.telemetry.percentile import percentile


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def ended(latency_s: float, mostly: str = "generation", outcome: Outcome = "answered", **facts: Any) -> EndedRequest:
    parts = dict.fromkeys(PARTS, 0.0) | {"prefill": 0.2 * latency_s}
    parts[mostly] += 0.8 * latency_s
    return EndedRequest(outcome, latency_s, parts, **facts)


def metrics(clock: Clock, window: int = 1000, window_s: float = 300.0) -> RequestMetrics:
    return RequestMetrics(target_s=2.0, window=window, window_s=window_s, clock=clock)


@pytest.mark.parametrize("count", [1, 2, 19, 20, 500])
def test_percentiles_are_numpys(count: int) -> None:
    clock = Clock()
    found, chance = metrics(clock), random.Random(count)
    values = [chance.expovariate(1) for _ in range(count)]
    for value in values:
        found.add(ended(value))
    clock.now_s += 10
    report = found.report()
    for name, share in (("p50", 50), ("p95", 95), ("p99", 99)):
        assert report[name] == pytest.approx(np.percentile(values, share))
    assert report["average"] == pytest.approx(np.mean(values))
    assert sum(report["breakdown"].values()) == pytest.approx(report["average"])
    assert percentile([], 50) == 0.0


def test_rates() -> None:
    clock = Clock()
    found = metrics(clock)
    for hit in (True, False, False, True):
        found.add(ended(0.1, cache_hit=hit, new_tokens=0 if hit else 30))
    found.add(ended(0.1, outcome="failed"))
    found.add(ended(0.1, outcome="cancelled", new_tokens=0))
    clock.now_s += 10
    report = found.report()
    assert (report["total_requests"], report["failed"], report["cancelled"]) == (6, 1, 1)
    assert report["cache_hit_rate"] == 0.5 and report["uptime"] == 10
    assert report["throughput"] == pytest.approx(0.4) and report["tokens_per_second"] == pytest.approx(6.0)


def test_the_window_is_bounded_in_number_and_in_time() -> None:
    clock = Clock()
    found = metrics(clock, window=4, window_s=60)
    for latency_s in (50.0, 50.0, 1.0, 1.0, 1.0, 1.0):
        clock.now_s += 1
        found.add(ended(latency_s))
    clock.now_s += 1
    report = found.report()
    assert (report["p99"], report["total_requests"], report["sla"]["requests"]) == (1.0, 6, 4)
    assert report["throughput"] == pytest.approx(1.0)  # four in the four seconds since the oldest of them
    clock.now_s += 60
    report = found.report()
    assert (report["p95"], report["throughput"], report["total_requests"]) == (0.0, 0.0, 6)
    assert report["meets_sla"] is True and report["sla"]["reason"] == "no requests in the last 60 s"


def test_the_target() -> None:
    found = metrics(Clock())
    assert found.report()["meets_sla"] is True and found.report()["sla"]["reason"] == "no requests yet"
    for _ in range(95):
        found.add(ended(0.5))
    report = found.report()
    assert (
        report["meets_sla"] is True and report["sla"]["reason"] == "P95 0.50 s over the last 95 requests is within 2 s"
    )
    for _ in range(10):
        found.add(ended(5.0, mostly="queue"))
    sla = found.report()["sla"]
    assert found.report()["meets_sla"] is sla["meets"] is False
    assert sla["reason"] == (
        "P95 5.00 s over the last 105 requests exceeds 2 s; of the time of the slow ones, 80 % went to waiting in the queue"
    )
    assert (sla["target"], sla["measured"], sla["requests"]) == (2.0, 5.0, 105)


def test_a_value_beside_the_target_is_told_apart_from_it() -> None:
    found = metrics(Clock())
    found.add(ended(2.0004))
    assert "P95 2.0004 s over 1 request exceeds 2 s" in found.report()["sla"]["reason"]


def test_callers_that_gave_up_after_the_target_count() -> None:
    found = metrics(Clock())
    found.add(ended(0.5))
    for outcome in ("cancelled", "failed"):
        found.add(ended(0.1, outcome=outcome))  # type: ignore[arg-type]
    assert found.report()["sla"]["requests"] == 1
    for _ in range(9):
        found.add(ended(2.5, outcome="cancelled"))
    assert found.report()["meets_sla"] is False and found.report()["sla"]["requests"] == 10


def test_parts_add_up_however_they_are_ended() -> None:
    parts = Breakdown(10.0)
    parts.end("queue", 12.0)
    parts.end("prefill", 11.0)  # a moment before the last: nothing is counted twice
    parts.end("queue", 15.0)
    assert parts.parts["queue"] == 5.0 and parts.parts["prefill"] == 0.0
    assert sum(parts.parts.values()) == parts.latency_s == 5.0
