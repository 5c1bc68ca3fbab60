"""Do the arms of an experiment differ? Numbers from audit records, with the chance that they are chance.

Does: group records by arm, test failure rates (two proportions, z) and means (Welch's t), give each difference its interval.
Does not: read files, or compute distributions (`distributions.py`).
A p-value is the probability of a difference at least this large if there were none. With many arms and measures some
will look small by luck: `Comparison.significant` divides the threshold by their number (Bonferroni). Intervals are at 95 %
each, and not corrected in this way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tonle.gateway.distributions import normal_quantile, t_quantile, t_two_sided

ALPHA = 0.05
FAILED = ("failed",)
Interval = tuple[float, float]
COUNTED = ("ok", "failed")  # refused, cancelled and cached requests say nothing about an arm


@dataclass(slots=True)
class Moments:
    """Number, mean and spread of values, without the values (Welford)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared distances from the mean

    @classmethod
    def of(cls, values: Iterable[float]) -> Moments:
        found = cls()
        for value in values:
            found.add(value)
        return found

    def add(self, value: float) -> None:
        self.count += 1
        distance = value - self.mean
        self.mean += distance / self.count
        self.squares += distance * (value - self.mean)

    @property
    def error(self) -> float:
        """Variance of the mean; for at least two values."""
        return self.squares / (self.count - 1) / self.count


@dataclass(slots=True)
class ArmResult:
    name: str
    num_requests: int = 0
    num_failed: int = 0
    measures: dict[str, Moments] = field(default_factory=dict)  # by name, of answered requests

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
    interval: Interval | None  # of value - control, at 95 %; None: too few to tell
    threshold: float

    @property
    def difference(self) -> float:
        return self.value - self.control

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
        if part and part.get("name") == experiment:
            add_record(arms, record)
    return arms


def add_record(arms: dict[str, ArmResult], record: Mapping[str, Any]) -> None:
    """A record of the experiment whose arms these are."""
    name, status = record["experiment"]["arm"], record.get("status")
    if status not in COUNTED:
        return
    arm = arms.setdefault(name, ArmResult(name))
    arm.num_requests += 1
    if status in FAILED:
        arm.num_failed += 1
        return
    for measure, read in MEASURES.items():
        if (value := read(record)) is not None:
            arm.measures.setdefault(measure, Moments()).add(float(value))


def compare(arms: Mapping[str, ArmResult], control: str) -> list[Comparison]:
    """Every other arm against `control`."""
    first = arms[control]
    others = [arm for arm in arms.values() if arm.name != control]
    threshold = ALPHA / max(1, len(others) * (1 + len(MEASURES)))
    found = []
    for arm in others:
        counts = (first.num_failed, first.num_requests, arm.num_failed, arm.num_requests)
        rates, p_value, interval = (first.failure_rate, arm.failure_rate), two_proportions(*counts), newcombe(*counts)
        if first.num_requests and arm.num_requests:
            found.append(Comparison(arm.name, "failure_rate", *rates, p_value, interval, threshold))
        for measure in MEASURES:
            ours, theirs = first.measures.get(measure), arm.measures.get(measure)
            if ours is not None and theirs is not None:
                p_value, interval = welch(ours, theirs), welch_interval(ours, theirs)
                found.append(Comparison(arm.name, measure, ours.mean, theirs.mean, p_value, interval, threshold))
    return found


# -- proportions


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


def wilson(hits: int, num: int) -> Interval | None:
    """95 % interval of one rate; None without a request."""
    if not num:
        return None
    z = normal_quantile(1 - ALPHA / 2)
    rate, spread = hits / num, z * z / num
    middle = rate + spread / 2
    half = z * math.sqrt(rate * (1 - rate) / num + spread / (4 * num))
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


def newcombe(hits_a: int, num_a: int, hits_b: int, num_b: int) -> Interval | None:
    """95 % interval of rate b - rate a (Newcombe's method 10): right for small numbers and rates near 0, too."""
    of_a, of_b = wilson(hits_a, num_a), wilson(hits_b, num_b)
    if of_a is None or of_b is None:
        return None
    rate_a, rate_b = hits_a / num_a, hits_b / num_b
    difference = rate_b - rate_a
    return (
        difference - math.hypot(rate_b - of_b[0], of_a[1] - rate_a),
        difference + math.hypot(of_b[1] - rate_b, rate_a - of_a[0]),
    )


# -- means


def welch(a: Moments, b: Moments) -> float | None:
    """Two-sided p of Welch's t-test; None for fewer than two values or no spread."""
    freedom = _freedom(a, b)
    if freedom is None:
        return None
    return t_two_sided((a.mean - b.mean) / math.sqrt(a.error + b.error), freedom)


def welch_interval(a: Moments, b: Moments) -> Interval | None:
    """95 % interval of mean b - mean a; None where `welch` has none."""
    freedom = _freedom(a, b)
    if freedom is None:
        return None
    half = t_quantile(1 - ALPHA / 2, freedom) * math.sqrt(a.error + b.error)
    return b.mean - a.mean - half, b.mean - a.mean + half


def _freedom(a: Moments, b: Moments) -> float | None:
    """Degrees of freedom (Welch-Satterthwaite)."""
    if a.count < 2 or b.count < 2 or a.error + b.error == 0:
        return None
    return (a.error + b.error) ** 2 / (a.error**2 / (a.count - 1) + b.error**2 / (b.count - 1))
