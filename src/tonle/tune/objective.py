"""What "better" means: `Goal` orders outcomes, `Outcome` is what settings came to, over one run or several.

Does: pool runs, judge them by the SLO, rank. Does not: measure, simulate, or tell chance from effect (`verdict.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from tonle.bench.keeping_up import KEPT_UP
from tonle.bench.measure import LevelReport, Spread, spread
from tonle.bench.numbers import bytes_text, share_text
from tonle.bench.slo import MOST_FAILED, Bound, BoundResult, Latencies, Slo, duration_text
from tonle.errors import ConfigError

Maximize = Literal["goodput", "throughput"]

# The scale of one number for the optimizer: only its order matters.
_GROUP = 1e6
_MISS_WEIGHT = 1e-3


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Of some settings under the load. Latencies are over all requests of all runs, rates are means of the runs."""

    runs: int
    requests: int
    failed: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    goodput_per_s: float | None  # None: there is no SLO
    good_share: float | None
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2el_ms: Spread | None
    bounds: list[BoundResult]
    duration_s: float  # of all runs together
    gpu_use: float | None = None  # share of time, mean of the runs; None: simulated, or no GPU was read
    gpu_memory: int | None = None  # bytes, the most of a run
    falling_behind: float | None = None  # open loop: seconds that answers take longer per second, mean of the runs

    @property
    def holds(self) -> bool:
        """Every bound holds, and nearly all requests were answered, also where no bound counts those that failed."""
        answered = self.requests > 0 and self.failed <= MOST_FAILED * self.requests
        return answered and all(result.holds for result in self.bounds)

    @property
    def keeps_up(self) -> bool:
        """Open loop: as many requests are answered as come. Else they wait longer and longer, which no bound may show: those on
        ITL and TPOT never do, those on TTFT only once it has gone on for long enough."""
        return 1 / (1 + max(0.0, self.falling_behind or 0.0)) >= KEPT_UP


def outcome_of(levels: Sequence[LevelReport], slo: Slo) -> Outcome:
    """`levels` have rows, one per request."""
    rows = [row for level in levels for row in level.rows or ()]
    answered = [row for row in rows if row.failure is None]
    latencies = [Latencies(row.ttft_ms, row.tpot_ms, row.e2el_ms, row.itl_ms) for row in answered]
    requests, failed = len(rows), len(rows) - len(answered)
    good = sum(map(slo.is_good, latencies))
    return Outcome(
        runs=len(levels),
        requests=requests,
        failed=failed,
        requests_per_s=_mean([level.requests_per_s for level in levels]),
        output_tokens_per_s=_mean([level.output_tokens_per_s for level in levels]),
        total_tokens_per_s=_mean([level.total_tokens_per_s for level in levels]),
        goodput_per_s=_mean([_goodput(level, slo) for level in levels]) if slo else None,
        good_share=good / requests if slo and requests else None,
        ttft_ms=spread(row.ttft_ms for row in answered),
        tpot_ms=spread(row.tpot_ms for row in answered),
        itl_ms=spread(gap for row in answered for gap in row.itl_ms),
        e2el_ms=spread(row.e2el_ms for row in answered),
        bounds=slo.judge(latencies, failed),
        duration_s=sum(level.duration_s for level in levels),
        gpu_use=_mean(uses) if (uses := [use for level in levels if (use := level.gpu_use) is not None]) else None,
        gpu_memory=max((used for level in levels if (used := level.gpu_memory) is not None), default=None),
        falling_behind=_mean(behind)
        if (behind := [slope for level in levels if (slope := level.falling_behind) is not None])
        else None,
    )


def _goodput(level: LevelReport, slo: Slo) -> float:
    """Requests per second that each keep the SLO."""
    rows = [row for row in level.rows or () if row.failure is None]
    good = sum(slo.is_good(Latencies(row.ttft_ms, row.tpot_ms, row.e2el_ms, row.itl_ms)) for row in rows)
    return good / level.duration_s if level.duration_s > 0 else 0.0


class Goal(msgspec.Struct, frozen=True):
    """Among settings that hold the SLO the most goodput or throughput; where none holds it, the most goodput."""

    slo: Slo = Slo()
    maximize: Maximize = "goodput"
    margin: float = (
        0.0  # share of the limits that is to stay free: what is simulated may come a little slower in reality
    )

    def validate(self) -> None:
        """Raises `ConfigError` for goals that make no sense."""
        if not self.slo and self.maximize == "goodput":
            raise ConfigError(
                "say what to tune for: an SLO such as --ttft-p95 200ms --itl-p99 50ms, or --maximize throughput",
                param="slo",
            )
        for bound in self.slo.bounds:
            for other in self.slo.bounds:
                _check_pair(bound, other)

    def value(self, outcome: Outcome) -> float:
        """What is maximized: good requests per second, or output tokens per second."""
        if self.maximize == "throughput":
            return outcome.output_tokens_per_s
        return outcome.goodput_per_s or 0.0

    def rank(self, outcome: Outcome) -> tuple[int, float, float]:
        """Larger is better: holds with the margin (2), holds (1), misses (0), each by what is maximized."""
        if not outcome.holds:
            return 0, outcome.goodput_per_s or 0.0, -_excess(outcome)
        return 1 + self._has_margin(outcome), self.value(outcome), 0.0

    def _has_margin(self, outcome: Outcome) -> bool:
        bounds = [each for each in outcome.bounds if each.value_ms is not None]
        return all((each.value_ms or 0.0) <= (1 - self.margin) * each.bound.limit_ms for each in bounds)

    def score(self, outcome: Outcome, reference: Outcome) -> float:
        """The same order as one number, for an optimizer. `reference`: the default's outcome."""
        group, value, nearness = self.rank(outcome)
        of_default = self.value(reference) if group and self.value(reference) else reference.requests_per_s
        return _GROUP * group + value / max(of_default, 1e-9) + _MISS_WEIGHT * nearness

    @property
    def unit(self) -> str:
        return "output tok/s" if self.maximize == "throughput" else "good requests/s"

    def __str__(self) -> str:
        if not self.slo:
            return "most output tokens per second"
        most = "output tokens" if self.maximize == "throughput" else "good requests"
        return f"{self.slo}, and then the most {most} per second"


def _check_pair(bound: Bound, other: Bound) -> None:
    if bound.metric == other.metric and bound.percent < other.percent and bound.limit_ms > other.limit_ms:
        raise ConfigError(
            f"{bound} says nothing beside {other}: the lower percentile is never the larger one; leave it out or lower it",
            param="slo",
        )
    if (
        (bound.metric, other.metric) == ("ttft", "e2el")
        and bound.percent <= other.percent
        and bound.limit_ms > other.limit_ms
    ):
        raise ConfigError(
            f"{bound} says nothing beside {other}: an answer cannot end before it begins; leave it out or lower it",
            param="slo",
        )


def _excess(outcome: Outcome) -> float:
    """How far the bounds are missed: the sum of the logarithms."""
    total = 0.0
    for result in outcome.bounds:
        if not result.holds:
            total += 10.0 if result.value_ms is None else math.log(max(result.value_ms / result.bound.limit_ms, 1.0))
    return total


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def one_line(outcome: Outcome, goal: Goal) -> str:
    """`12.3 good requests/s (SLO held), 512 output tok/s, TTFT p95 180 ms, ITL p99 31 ms`."""
    parts = []
    if outcome.goodput_per_s is not None:
        held = "SLO held" if outcome.holds else "SLO missed"
        parts.append(f"{outcome.goodput_per_s:.3g} good requests/s ({held})")
    parts.append(f"{outcome.output_tokens_per_s:.4g} output tok/s")
    shown = goal.slo.bounds or (Bound("ttft", 95, math.inf), Bound("itl", 99, math.inf))
    for bound in shown:
        value = _of(outcome, bound)
        parts.append(f"{bound.metric.upper()} p{bound.percent:g} {'–' if value is None else duration_text(value)}")
    if outcome.failed:
        parts.append(f"{outcome.failed} of {outcome.requests} failed")
    if outcome.gpu_use is not None or outcome.gpu_memory is not None:
        parts.append(f"GPU {share_text(outcome.gpu_use)} busy, {bytes_text(outcome.gpu_memory)}")
    return ", ".join(parts)


def _of(outcome: Outcome, bound: Bound) -> float | None:
    for result in outcome.bounds:
        if result.bound == bound:
            return result.value_ms
    found: Spread | None = getattr(outcome, f"{bound.metric}_ms")
    return None if found is None else getattr(found, f"p{bound.percent:g}", None)
