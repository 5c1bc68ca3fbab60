"""`Sweep`: search the load at which a server is saturated, or the highest at which it keeps an SLO.

Does: say which load to try next, from what the loads before showed: double until it is too much, then halve the bracket. Says
where it ended and why. Does not: send anything; a measured and a simulated level are judged alike.

Too much is a load that
    misses a bound of the SLO, if there is one;
    rate: is not kept up with: answers per second below 95 % of it (`KEPT_UP`);
    concurrency: brings less than 5 % more throughput than half of it (`GROWTH`).
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from tonle.bench.load import Arrivals, Load
from tonle.bench.measure import LevelReport
from tonle.bench.self_check import is_limit

SweepKind = Literal["rate", "concurrency"]
Ending = Literal["throughput", "slo", "cap", "interrupted"]

KEPT_UP = 0.95  # of the rate that was asked for
GROWTH = 1.05  # of throughput, when users double
CLOSE_ENOUGH = 0.05  # of the bracket's upper end
MAX_USERS = 4096
LONG_ENOUGH = 5  # times an answer's own time, for a level that tells whether a rate is kept up with


class Saturation(msgspec.Struct, frozen=True, kw_only=True):
    """Where a sweep ended. None: no load that was tried was low enough."""

    by: SweepKind
    load: float | None  # users, or requests per second: the highest that was not too much
    too_much: float | None  # the lowest that was; None: none was
    requests_per_s: float | None  # at `load`
    output_tokens_per_s: float | None
    limited_by: Ending  # what was too much about the next higher load, or what ended the search
    why: str  # the same in a sentence


class Sweep:
    """Owns one search. Call `next_load`, measure it, give the level to `add`, until there is no next load."""

    def __init__(
        self,
        kind: SweepKind,
        start: float,
        *,
        max_levels: int,
        arrivals: Arrivals = "poisson",
        burstiness: float = 1.0,
    ) -> None:
        self._kind = kind
        self._start = start
        self._max_levels = max_levels
        self._arrivals: Arrivals = arrivals
        self._burstiness = burstiness
        self._levels: dict[float, LevelReport] = {}

    def add(self, load: Load, level: LevelReport) -> None:
        self._levels[load.value] = level

    def next_load(self) -> Load | None:
        if len(self._levels) >= self._max_levels:
            return None
        value = self._next_value()
        if value is None:
            return None
        if self._kind == "concurrency":
            return Load("concurrency", value)
        return Load("rate", value, arrivals=self._arrivals, burstiness=self._burstiness)

    def _next_value(self) -> float | None:
        if not self._levels:
            return self._start
        low, high = self._bracket()
        if high is None:
            assert low is not None, "a level is fine or too much"
            if self._kind == "concurrency":
                return low * 2 if low * 2 <= MAX_USERS else None
            return low * 2
        if high - (low or 0.0) <= CLOSE_ENOUGH * high:
            return None
        middle = ((low or 0.0) + high) / 2
        middle = _three_digits(middle) if self._kind == "rate" else math.floor(middle)
        return middle if (low or 0.0) < middle < high else None

    def _bracket(self) -> tuple[float | None, float | None]:
        """The highest load below all that were too much, and the lowest that was."""
        high = min((value for value in self._levels if self._too_much(value) is not None), default=None)
        low = max((value for value in self._levels if high is None or value < high), default=None)
        return low, high

    def _too_much(self, value: float) -> Ending | None:
        """What was too much about a load; None: nothing."""
        level = self._levels[value]
        if not all(result.holds for result in level.slo):
            return "slo"
        if level.succeeded == 0:
            return "throughput"
        if self._kind == "rate":
            return None if self._answered_per_s(level) >= KEPT_UP * value else "throughput"
        return "throughput" if self._is_flat(value) else None

    def _is_flat(self, value: float) -> bool:
        """Whether fewer users get nearly as much done: at the ratio that a doubling must bring, for any lower load."""
        speed = self._levels[value].output_tokens_per_s
        for lower, level in self._levels.items():
            if lower < value and speed < level.output_tokens_per_s * GROWTH ** math.log2(value / lower):
                return True
        return False

    def _answered_per_s(self, level: LevelReport) -> float:
        """Without the wait for the last answers, which is no sign of a slow server: it counts little in a long level."""
        tails = [other.e2el_ms.p50 / 1e3 for other in self._levels.values() if other.e2el_ms is not None]
        return level.succeeded / max(level.duration_s - min(tails, default=0.0), 1e-9)

    def notes(self) -> list[str]:
        """What the reader of the result should know."""
        low, _ = self._bracket() if self._levels else (None, None)
        level = None if low is None else self._levels[low]
        if self._kind == "concurrency" or level is None or level.e2el_ms is None:
            return []
        answer_s = level.e2el_ms.p50 / 1e3
        if level.duration_s >= LONG_ENOUGH * answer_s:
            return []
        return [
            f"sweep: an answer took {answer_s:.2g} s of a level of {level.duration_s:.2g} s; "
            f"--duration {math.ceil(2 * LONG_ENOUGH * answer_s):g} would find the rate more exactly"
        ]

    def result(self, *, interrupted: bool = False) -> Saturation | None:
        """None: no level was measured."""
        if not self._levels:
            return None
        low, high = self._bracket()
        ending: Ending = "interrupted" if interrupted else "cap"
        if high is not None and (found := self._too_much(high)) is not None:
            ending = found
        level = None if low is None else self._levels[low]
        return Saturation(
            by=self._kind,
            load=low,
            too_much=high,
            requests_per_s=None if level is None else level.requests_per_s,
            output_tokens_per_s=None if level is None else level.output_tokens_per_s,
            limited_by=ending,
            why=self._why(low, high, ending, interrupted=interrupted),
        )

    def _why(self, low: float | None, high: float | None, ending: Ending, *, interrupted: bool) -> str:
        if high is None:
            reason = "it was stopped" if interrupted else "the search reached its limit"
            return f"{reason} before any load was too much"
        what = self._what(high, ending)
        if low is None:
            return f"the lowest load that was tried, {self._name(high)}, was too much: {what}"
        width = (high - low) / high
        rest = "" if width <= CLOSE_ENOUGH or (self._kind == "concurrency" and high - low <= 1) else (
            f"; the search {'was stopped' if interrupted else f'ended after {len(self._levels)} levels'} "
            f"with {width:.0%} between the two"
        )  # fmt: skip
        return f"at {self._name(high)} {what}{rest}"

    def _what(self, value: float, ending: Ending) -> str:
        level = self._levels[value]
        if ending == "slo":
            return "; ".join(str(result) for result in level.slo if not result.holds)
        if level.succeeded == 0:
            return "no request was answered"
        client = ", but the client itself was the limit" if is_limit(level) else ""
        if self._kind == "rate":
            return f"{self._answered_per_s(level):.3g} requests per second were answered{client}"
        return f"throughput no longer grew: {level.output_tokens_per_s:.1f} output tok/s{client}"

    def _name(self, value: float) -> str:
        return f"{value:g} requests per second" if self._kind == "rate" else f"{value:g} users"


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")
