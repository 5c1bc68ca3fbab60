"""Is a canary worse than the others? A pure function of how both have answered.

A failure rate counts as higher, and a p95 as longer, only if chance is an unlikely reason (95 %): a canary gets few requests, and
the p95 of twenty is a matter of luck. Of latencies, the number of the canary's requests beyond a limit is looked at: if the p95
were within it, one in twenty would be.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonle.gateway.comparison import newcombe, wilson
from tonle.observe.backend_figures import Figures
from tonle.observe.sketch import Sketch

_BEYOND_P95 = 0.05  # of requests
_SLACK_S = 0.001  # below this two latencies are the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How much worse a canary may be."""

    failure_rate: float = 0.01  # higher by this share of its requests
    latency: float = 0.25  # p95 longer by this share
    min_requests: int = 20  # of the canary, before anything is said


def why_worse(canary: Figures, others: Figures, tolerance: Tolerance) -> str | None:
    """None: it is not, as far as can be told."""
    if canary.requests < tolerance.min_requests:
        return None
    return (
        _more_failures(canary, others, tolerance)
        or _longer("time to first token", canary.ttft, others.ttft, tolerance)
        or _longer("time between tokens", canary.itl, others.itl, tolerance)
    )


def _more_failures(canary: Figures, others: Figures, tolerance: Tolerance) -> str | None:
    interval = newcombe(others.failed, others.requests, canary.failed, canary.requests)
    if interval is None:  # nothing to compare with
        return None
    theirs, ours = others.failed / others.requests, canary.failed / canary.requests
    if ours - theirs <= tolerance.failure_rate or interval[0] <= 0:
        return None
    return (
        f"{canary.failed} of its {canary.requests} requests failed ({ours:.1%}), of the others' {theirs:.1%}; "
        f"{tolerance.failure_rate:.1%} more would be tolerated"
    )


def _longer(what: str, canary: Sketch, others: Sketch, tolerance: Tolerance) -> str | None:
    theirs, ours = others.percentile(95), canary.percentile(95)
    if theirs is None or ours is None or canary.count < tolerance.min_requests:
        return None
    limit_s = theirs * (1 + tolerance.latency) + _SLACK_S
    beyond = wilson(canary.count_above(limit_s), canary.count)
    if beyond is None or beyond[0] <= _BEYOND_P95:
        return None
    return (
        f"its p95 of the {what} is {ours * 1000:.1f} ms, the others' {theirs * 1000:.1f} ms; "
        f"{tolerance.latency:.0%} more would be tolerated"
    )


def shown(figures: Figures) -> str:
    """For a line of progress."""
    parts = [f"{figures.requests} requests, {figures.failed} failed"]
    for name, sketch in (("TTFT", figures.ttft), ("ITL", figures.itl)):
        if (p95 := sketch.percentile(95)) is not None:
            parts.append(f"{name} p95 {p95 * 1000:.0f} ms")
    return ", ".join(parts)
