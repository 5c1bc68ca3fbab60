"""Do the arms of an experiment differ? Numbers from audit records, with the chance that they are chance.

Does: group records by arm, test failure rates (two proportions, z) and means (Welch's t). Does not: read files.
A p-value is the probability of a difference at least this large if there were none. With many arms and measures some
will look small by luck: `Comparison.significant` divides the threshold by their number (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

ALPHA = 0.05
FAILED = ("failed",)
COUNTED = ("ok", "failed")  # refused, cancelled and cached requests say nothing about an arm


@dataclass(slots=True)
class ArmResult:
    name: str
    num_requests: int = 0
    num_failed: int = 0
    measures: dict[str, list[float]] = field(default_factory=dict)  # by name, of answered requests

    @property
    def failure_rate(self) -> float:
        return self.num_failed / self.num_requests if self.num_requests else 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measure of one arm against the first arm."""

    arm: str
    measure: str
    control: float  # mean or rate
    value: float
    p_value: float | None  # None: too few to tell
    threshold: float

    @property
    def significant(self) -> bool:
        return self.p_value is not None and self.p_value < self.threshold


MEASURES: dict[str, Callable[[Mapping[str, Any]], float | None]] = {
    "latency_ms": lambda record: record["latency_ms"].get("total"),
    "ttft_ms": lambda record: record["latency_ms"].get("ttft"),
    "output_tokens": lambda record: (record.get("usage") or {}).get("completion_tokens"),
}


def gather(records: Iterable[Mapping[str, Any]], experiment: str) -> dict[str, ArmResult]:
    """By arm, in the order of first appearance."""
    arms: dict[str, ArmResult] = {}
    for record in records:
        part = record.get("experiment")
        if not part or part.get("name") != experiment or record.get("status") not in COUNTED:
            continue
        arm = arms.setdefault(part["arm"], ArmResult(part["arm"]))
        arm.num_requests += 1
        if record["status"] in FAILED:
            arm.num_failed += 1
            continue
        for name, read in MEASURES.items():
            if (value := read(record)) is not None:
                arm.measures.setdefault(name, []).append(float(value))
    return arms


def compare(arms: Mapping[str, ArmResult], control: str) -> list[Comparison]:
    """Every other arm against `control`."""
    first = arms[control]
    others = [arm for arm in arms.values() if arm.name != control]
    threshold = ALPHA / max(1, len(others) * (1 + len(MEASURES)))
    found = []
    for arm in others:
        p_value = two_proportions(first.num_failed, first.num_requests, arm.num_failed, arm.num_requests)
        found.append(Comparison(arm.name, "failure_rate", first.failure_rate, arm.failure_rate, p_value, threshold))
        for measure in MEASURES:
            ours, theirs = first.measures.get(measure, []), arm.measures.get(measure, [])
            if ours and theirs:
                found.append(Comparison(arm.name, measure, mean(ours), mean(theirs), welch(ours, theirs), threshold))
    return found


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def two_proportions(hits_a: int, num_a: int, hits_b: int, num_b: int) -> float | None:
    """Two-sided p of the pooled z-test; None if nothing can be said."""
    if not num_a or not num_b:
        return None
    pooled = (hits_a + hits_b) / (num_a + num_b)
    variance = pooled * (1 - pooled) * (1 / num_a + 1 / num_b)
    if variance == 0:
        return None
    z = (hits_a / num_a - hits_b / num_b) / math.sqrt(variance)
    return math.erfc(abs(z) / math.sqrt(2))


def welch(a: list[float], b: list[float]) -> float | None:
    """Two-sided p of Welch's t-test; None for fewer than two values or no spread."""
    if len(a) < 2 or len(b) < 2:
        return None
    part_a, part_b = _variance(a) / len(a), _variance(b) / len(b)
    if part_a + part_b == 0:
        return None
    t = (mean(a) - mean(b)) / math.sqrt(part_a + part_b)
    freedom = (part_a + part_b) ** 2 / (part_a**2 / (len(a) - 1) + part_b**2 / (len(b) - 1))
    return incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def _variance(values: list[float]) -> float:
    middle = mean(values)
    return math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1)


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function, by its continued fraction (Lentz): Student's t needs it."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    tiny, c, d = 1e-300, 1.0, 1 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > tiny else tiny)
    fraction = d
    for m in range(1, 300):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 + numerator * d
            d = 1 / (d if abs(d) > tiny else tiny)
            c = 1 + numerator / c
            c = c if abs(c) > tiny else tiny
            fraction *= c * d
        if abs(c * d - 1) < 1e-12:
            break
    return math.exp(log_front) * fraction / a
