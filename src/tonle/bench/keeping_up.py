"""Whether a server kept up with an open loop: how fast requests were due, and whether answers took longer and longer.

Does: numbers from a level's samples; say where a rate is surely too much. Does not: search (`sweep.py`).
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tonle.bench.measure import Sample

KEPT_UP = 0.95  # of the requests that come: so many are answered in the same time


def offered_per_s(samples: list[Sample]) -> float | None:
    """Requests per second as they were due; None of a closed loop."""
    due_s = [sample.due_s for sample in samples if sample.due_s is not None]
    span_s = max(due_s) - min(due_s) if due_s else 0.0
    return (len(due_s) - 1) / span_s if span_s > 0 else None


def falling_behind(good: list[Sample]) -> float | None:
    """Slope of E2EL over the time at which requests were due, by least squares. With ρ times the rate that a server can answer,
    what is due at t ends at ρ·t: its E2EL grows by ρ − 1 per second. The first quarter, when the server fills, is left out."""
    points = _points(good)
    return statistics.linear_regression(*zip(*points, strict=True)).slope if points else None


def is_overloaded(good: list[Sample]) -> bool:
    """Whether answers take longer and longer, by more than chance: two standard errors of the slope."""
    points = _points(good)
    if not points:
        return False
    due_s, took_s = zip(*points, strict=True)
    slope, begin_s = statistics.linear_regression(due_s, took_s)
    left = math.fsum((took - begin_s - slope * due) ** 2 for due, took in points)
    spread = math.fsum((due - statistics.fmean(due_s)) ** 2 for due in due_s)
    error = math.sqrt(left / (len(points) - 2) / spread)
    return 1 / (1 + max(0.0, slope - 2 * error)) < KEPT_UP


def _points(good: list[Sample]) -> list[tuple[float, float]]:
    """When requests were due, and how long they took; empty where they are too few for a slope."""
    due_s = [sample.due_s for sample in good if sample.due_s is not None]
    if not due_s:
        return []
    from_s = min(due_s) + (max(due_s) - min(due_s)) / 4
    points = [
        (sample.due_s, sample.e2el_s)
        for sample in good
        if sample.due_s is not None and sample.e2el_s is not None and sample.due_s >= from_s
    ]
    if len(points) < 3 or len({moment_s for moment_s, _ in points}) < 2:
        return []
    return points
