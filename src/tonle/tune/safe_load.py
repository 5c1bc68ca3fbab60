"""The largest load at which the SLO holds, and what a gateway in front should let through.

Does: search by doubling and halving over outcomes that are handed in, derive limits. Does not: simulate or measure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import msgspec

from tonle.bench.sweep import SweepKind
from tonle.tune.objective import Goal, Outcome

MOST_USERS = 4096
MOST_RATE = 4096.0
LEAST_RATE = 0.01
RESOLUTION = 0.05  # a load is known well enough when the bounds around it are this close
KNEE = 0.95  # of the most throughput
DEFAULT_WAIT_S = 10.0  # how long a caller may wait for a first token, where no SLO says it

OutcomeAt = Callable[[float], Outcome]


class SafeLoad(msgspec.Struct, frozen=True, kw_only=True):
    """`value` None: no load that was tried is safe."""

    kind: SweepKind
    value: float | None
    outcome: Outcome | None  # there
    source: Literal["simulated", "measured"]
    confirmed: bool = False  # by a measurement at this load
    stepped_down: bool = False  # a measurement at a higher load, which the simulation called safe, said that it is not

    @property
    def text(self) -> str:
        if self.value is None:
            return "none"
        if self.kind == "rate":
            return f"{self.value:.3g} requests/s"
        return "1 user" if self.value == 1 else f"{self.value:.0f} users"


def find_safe_load(
    kind: SweepKind, goal: Goal, outcome_at: OutcomeAt, *, has_time: Callable[[], bool] = lambda: True
) -> SafeLoad:
    """The largest load at which the SLO holds and requests are answered as fast as they come; without an SLO, the smallest with
    nearly all of the throughput. So, too, of users where no bound says how long they may wait: any number of them would do.

    When the time is over, the largest so far.
    """
    seen: dict[float, Outcome] = {}

    def at(load: float) -> Outcome:
        if load not in seen:
            seen[load] = outcome_at(load)
        return seen[load]

    if goal.slo:
        may_wait = kind == "concurrency" and not any(bound.metric in ("ttft", "e2el") for bound in goal.slo.bounds)
        found = _largest(kind, at, has_time, may_wait=may_wait)
    else:
        found = _knee(kind, at, has_time)
    return SafeLoad(kind=kind, value=found, outcome=None if found is None else seen[found], source="simulated")


def is_safe(outcome: Outcome) -> bool:
    return outcome.holds and outcome.keeps_up


def _largest(kind: SweepKind, at: OutcomeAt, has_time: Callable[[], bool], *, may_wait: bool) -> float | None:
    """`may_wait`: for as long as it takes; then a load that brings hardly more throughput is one too many."""
    most = MOST_USERS if kind == "concurrency" else MOST_RATE
    low, high = None, 1.0
    if kind == "rate":
        while not is_safe(at(high)):
            if high < LEAST_RATE:
                return None
            high /= 2
        low = high
    while is_safe(at(high)):
        if may_wait and low is not None and not _brings_more(at(low), at(high)):
            return low
        low = high
        if high >= most or not has_time():
            return high
        high = min(high * 2, most)
    if low is None:
        return None
    while has_time() and high - low > max(RESOLUTION * low, 1.0 if kind == "concurrency" else 0.0):
        middle = _between(kind, low, high)
        if is_safe(at(middle)):
            low = middle
        else:
            high = middle
    return low


def _knee(kind: SweepKind, at: OutcomeAt, has_time: Callable[[], bool]) -> float:
    """Doubling brings less than a twentieth more: the load before it is enough."""
    load = 1.0
    most = MOST_USERS if kind == "concurrency" else MOST_RATE
    at(load)
    while (
        kind == "rate" and load > LEAST_RATE and at(load / 2).output_tokens_per_s > KNEE * at(load).output_tokens_per_s
    ):
        load /= 2
    while load < most and has_time() and _brings_more(at(load), at(2 * load)):
        load *= 2
    return load


def _brings_more(outcome: Outcome, of_double: Outcome) -> bool:
    return of_double.output_tokens_per_s * KNEE > outcome.output_tokens_per_s


def _between(kind: SweepKind, low: float, high: float) -> float:
    return float(round((low + high) / 2)) if kind == "concurrency" else (low + high) / 2


class GatewayLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Per backend, but for the last two: those are the capacity that limits of all keys share."""

    max_concurrent: int
    max_queued: int
    max_queued_tokens: int
    requests_per_minute: int
    tokens_per_minute: int
    wait_s: float  # the longest that a request may wait in the queue, which the two limits on it follow from


def gateway_limits(safe: SafeLoad, goal: Goal, *, prefill_tokens_per_s: float) -> GatewayLimits | None:
    """None where no load is safe. What waits longer than the SLO allows is better refused (429) than answered too late."""
    outcome = safe.outcome
    if safe.value is None or outcome is None:
        return None
    users = safe.value
    if safe.kind == "rate":  # Little's law, and room for arrivals that come together
        busy = safe.value * (outcome.e2el_ms.mean / 1e3 if outcome.e2el_ms else 1.0)
        users = busy + 2 * math.sqrt(busy)
    allowed_s = _first_token_s(goal, outcome)
    usual_s = outcome.ttft_ms.p50 / 1e3 if outcome.ttft_ms else 0.0
    wait_s = max(0.0, allowed_s - usual_s)
    return GatewayLimits(
        max_concurrent=max(1, math.ceil(users)),
        max_queued=int(wait_s * outcome.requests_per_s),
        max_queued_tokens=max(1, int(wait_s * prefill_tokens_per_s)),
        requests_per_minute=max(1, int(60 * outcome.requests_per_s)),
        tokens_per_minute=max(1, int(60 * outcome.total_tokens_per_s)),
        wait_s=wait_s,
    )


def _first_token_s(goal: Goal, outcome: Outcome) -> float:
    """By when the first token must be there."""
    limits = [bound.limit_ms for bound in goal.slo.bounds if bound.metric == "ttft"]
    answer_ms = outcome.e2el_ms.p50 - (outcome.ttft_ms.p50 if outcome.ttft_ms else 0.0) if outcome.e2el_ms else 0.0
    limits += [max(0.0, bound.limit_ms - answer_ms) for bound in goal.slo.bounds if bound.metric == "e2el"]
    return min(limits) / 1e3 if limits else DEFAULT_WAIT_S
