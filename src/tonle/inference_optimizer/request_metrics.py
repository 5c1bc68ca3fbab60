"""`RequestMetrics`: what recent requests took, and whether that meets the latency target.

Does: count, percentiles, rates, the reason why the target is missed. Does not: measure.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tonle.inference_optimizer.breakdown import IN_WORDS, PARTS
from tonle.telemetry.percentile import percentile

Outcome = Literal["answered", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class EndedRequest:
    outcome: Outcome
    latency_s: float
    parts: Mapping[str, float]  # of its latency, seconds
    cache_hit: bool = False
    new_tokens: int = 0  # generated for it; 0 if it was answered from the cache


class RequestMetrics:
    """Thread-safe. The window is the latest `window` requests that ended within the last `window_s` seconds."""

    def __init__(
        self, *, target_s: float, window: int, window_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._target_s = target_s
        self._window_s = window_s
        self._clock = clock
        self._began_s = clock()
        self._ended: deque[tuple[float, EndedRequest]] = deque(maxlen=window)  # when, what
        self._totals: dict[Outcome, int] = {"answered": 0, "failed": 0, "cancelled": 0}
        self._lock = threading.Lock()

    def add(self, request: EndedRequest) -> None:
        with self._lock:
            self._ended.append((self._clock(), request))
            self._totals[request.outcome] += 1

    def report(self) -> dict[str, Any]:
        """Seconds, and rates per second."""
        with self._lock:
            now_s, ended, totals = self._clock(), list(self._ended), dict(self._totals)
        full = len(ended) == self._ended.maxlen
        recent = [(at_s, request) for at_s, request in ended if at_s >= now_s - self._window_s]
        uptime_s = now_s - self._began_s
        span_s = min(self._window_s, uptime_s)
        if full and len(recent) == len(ended):  # what ended before these is not known any more
            span_s = min(span_s, now_s - ended[0][0])
        answered = [request for _, request in recent if request.outcome == "answered"]
        counted = [request for _, request in recent if self._counts(request)]
        latencies = sorted(request.latency_s for request in counted)
        p50, p95, p99 = (percentile(latencies, percent) for percent in (50, 95, 99))
        sla = self._sla(p95, counted, ever=sum(totals.values()) > 0)
        return {
            "total_requests": sum(totals.values()),
            "failed": totals["failed"],
            "cancelled": totals["cancelled"],
            "p50": p50,
            "p95": p95,
            "p99": p99,
            "average": sum(latencies) / len(latencies) if latencies else 0.0,
            "breakdown": mean_parts(counted),
            "cache_hit_rate": sum(request.cache_hit for request in answered) / len(answered) if answered else 0.0,
            "throughput": len(answered) / span_s if span_s > 0 else 0.0,
            "tokens_per_second": sum(request.new_tokens for _, request in recent) / span_s if span_s > 0 else 0.0,
            "meets_sla": sla["meets"],
            "sla": sla,
            "uptime": uptime_s,
        }

    def _counts(self, request: EndedRequest) -> bool:
        """Whether its latency does. One that failed or was given up early says nothing; one that took too long does."""
        return request.outcome == "answered" or request.latency_s > self._target_s

    def _sla(self, p95_s: float, counted: list[EndedRequest], *, ever: bool) -> dict[str, Any]:
        target_s = self._target_s
        meets = p95_s <= target_s
        if not counted:
            reason = f"no requests in the last {self._window_s:g} s" if ever else "no requests yet"
        else:
            many = f"the last {len(counted)} requests" if len(counted) > 1 else "1 request"
            verb = "is within" if meets else "exceeds"
            reason = f"P95 {_seconds(p95_s, target_s)} over {many} {verb} {target_s:g} s"
        if not meets:
            slow = mean_parts([request for request in counted if request.latency_s > target_s])
            part = max(slow, key=lambda name: slow[name])
            share = slow[part] / sum(slow.values())
            reason += f"; of the time of the slow ones, {100 * share:.0f} % went to {IN_WORDS[part]}"
        return {"meets": meets, "target": target_s, "measured": p95_s, "requests": len(counted), "reason": reason}


def mean_parts(requests: Sequence[EndedRequest]) -> dict[str, float]:
    """Seconds per part of the latency, on average."""
    count = max(1, len(requests))
    return {part: math.fsum(request.parts[part] for request in requests) / count for part in PARTS}


def _seconds(value_s: float, target_s: float) -> str:
    """With as many digits as it takes to tell it from the target."""
    for digits in range(2, 7):
        if round(value_s, digits) != round(target_s, digits):
            return f"{value_s:.{digits}f} s"
    return f"{value_s:.6f} s"
