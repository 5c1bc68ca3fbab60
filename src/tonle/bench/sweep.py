"""`Sweep`: search the load at which a server is saturated, or the highest at which it keeps an SLO.

Does: say which load to try next, from what the loads before showed: double until it is too much, then halve the bracket. Says
where it ended and why. Does not: send anything; a measured and a simulated level are judged alike.

A load is too much if it
    misses a bound of the SLO, where there is one;
    rate: is not kept up with: answers per second are below 95 % of the requests that were due (`KEPT_UP`). A level is too
    short to count them; that answers take longer and longer shows it (`LevelReport.falling_behind`).
Users are different: more of them are never too much for throughput, it only stops growing. Doubling ends when it brings less than
5 % (`GROWTH`); the load that is then searched is the lowest with 95 % of the best throughput (`NEAR_BEST`).
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from tonle.bench.keeping_up import KEPT_UP
from tonle.bench.kinds.metrics import METRICS, KindMetrics
from tonle.bench.load import Arrivals, Load
from tonle.bench.measure import LevelReport
from tonle.bench.self_check import is_limit

SweepKind = Literal["rate", "concurrency"]
Ending = Literal["throughput", "slo", "cap", "interrupted"]

GROWTH = 1.05  # of throughput, when users double
NEAR_BEST = 0.95
CLOSE_ENOUGH = 0.05  # of the bracket's upper end
MAX_USERS = 4096
ALONE = 0.1  # requests under way on average: a lower rate changes nothing for a request that has the server to itself
LEAST_SHARE = 1 / 16  # of the rate that a sweep starts at, where no request is answered
LONG_ENOUGH = 10  # times an answer's own time, for a level that tells whether a rate is kept up with


class Saturation(msgspec.Struct, frozen=True, kw_only=True):
    """Where a sweep ended. Loads are users, or requests per second."""

    by: SweepKind
    load: float | None  # what was searched; None: even the lowest load was too much
    low: (
        float | None
    )  # the two loads next to each other between which the boundary lies; None: there is none on that side
    high: float | None
    requests_per_s: float | None  # at `load`
    output_tokens_per_s: float | None
    limited_by: Ending  # what is beyond the boundary, or what ended the search
    why: str  # the same in a sentence
    throughput: float | None = None  # at `load`, of requests that are no chats
    throughput_unit: str | None = None


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
        metrics: KindMetrics = METRICS["chat"],
    ) -> None:
        self._kind = kind
        self._metrics = metrics
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
            assert low is not None, "a load is on one of the two sides"
            return None if self._kind == "concurrency" and low * 2 > MAX_USERS else low * 2
        if high - (low or 0.0) <= CLOSE_ENOUGH * high or (low is None and self._is_hopeless(high)):
            return None
        middle = ((low or 0.0) + high) / 2
        middle = _three_digits(middle) if self._kind == "rate" else math.floor(middle)
        return middle if (low or 0.0) < middle < high else None

    def _is_hopeless(self, value: float) -> bool:
        """Whether half of a rate that is too much would be too much as well, and take twice as long to measure."""
        level = self._levels[value]
        if self._kind == "concurrency":
            return False
        if level.e2el_ms is None:
            return value <= LEAST_SHARE * self._start
        return value * level.e2el_ms.mean / 1e3 < ALONE

    def _bracket(self) -> tuple[float | None, float | None]:
        """The lowest load beyond the boundary, and the highest below that one."""
        high = min((value for value in self._levels if self._beyond(value) is not None), default=None)
        low = max((value for value in self._levels if high is None or value < high), default=None)
        return low, high

    def _beyond(self, value: float) -> Ending | None:
        """Why a load is beyond the boundary; None: it is not."""
        level = self._levels[value]
        if not _holds(level):
            return "slo"
        if level.succeeded == 0:
            return "throughput"
        if self._kind == "rate":
            return None if _answered_share(level) >= KEPT_UP else "throughput"
        return "throughput" if self._is_flat() and self._is_near_best(level) else None

    def _is_flat(self) -> bool:
        """Whether some doubling brought too little. Where the SLO was missed, that is the boundary and not this."""
        if not all(_holds(level) for level in self._levels.values()):
            return False
        return any(
            self._metrics.speed(level) < GROWTH * self._metrics.speed(lower)
            for value, level in self._levels.items()
            for lower_value, lower in self._levels.items()
            if lower_value <= value / 2
        )

    def _is_near_best(self, level: LevelReport) -> bool:
        best = max(self._metrics.speed(each) for each in self._levels.values())
        return self._metrics.speed(level) >= NEAR_BEST * best

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

    def saturation(self, *, interrupted: bool = False) -> Saturation | None:
        """None: no level was measured."""
        if not self._levels:
            return None
        low, high = self._bracket()
        ending: Ending = "interrupted" if interrupted else "cap"
        if high is not None and (found := self._beyond(high)) is not None:
            ending = found
        load = high if self._is_plateau(high) else low
        level = None if load is None else self._levels[load]
        is_chat = self._metrics is METRICS["chat"]
        return Saturation(
            by=self._kind,
            load=load,
            low=low,
            high=high,
            requests_per_s=None if level is None else level.requests_per_s,
            output_tokens_per_s=None if level is None else level.output_tokens_per_s,
            limited_by=ending,
            why=self._why(low, high, ending, interrupted=interrupted),
            throughput=None if level is None or is_chat else self._metrics.speed(level),
            throughput_unit=None if level is None or is_chat else self._metrics.speed_unit(level),
        )

    def _is_plateau(self, high: float | None) -> bool:
        """Whether the boundary is where users stop to bring throughput: then its upper side is the load to name."""
        return self._kind == "concurrency" and high is not None and self._levels[high].succeeded > 0 and self._is_flat()

    def _why(self, low: float | None, high: float | None, ending: Ending, *, interrupted: bool) -> str:
        if high is None:
            reason = "it was stopped" if interrupted else "the search reached its limit"
            return f"{reason} before any load was too much"
        what = self._what(high, ending)
        if low is None:
            return what if self._is_plateau(high) else f"the lowest load that was tried was too much: {what}"
        width = (high - low) / high
        if width <= CLOSE_ENOUGH or (self._kind == "concurrency" and high - low <= 1):
            return what
        ended = "was stopped" if interrupted else f"ended after {len(self._levels)} levels"
        return f"{what}; the search {ended} between {low:g} and {high:g}"

    def _what(self, value: float, ending: Ending) -> str:
        level = self._levels[value]
        name = (
            f"at {value:g} requests per second"
            if self._kind == "rate"
            else f"with {value:g} user{'' if value == 1 else 's'}"
        )
        if ending == "slo":
            missed = [str(result) for result in level.slo if not result.holds]
            return f"{name}, {'; '.join(missed) or f'{level.failed} of {level.requests} requests failed'}"
        if level.succeeded == 0:
            return f"{name} no request was answered"
        if self._kind == "rate":
            offered = value if level.offered_per_s is None else level.offered_per_s
            answered = _answered_share(level) * offered
            return f"{name}, {answered:.3g} of {offered:.3g} were answered{_client(level)}"
        best = max(self._levels, key=lambda each: self._metrics.speed(self._levels[each]))
        most = self._levels[best]
        speed = f"{self._metrics.speed(most):.1f} {self._metrics.speed_unit(most)}"
        return f"more users bring at most {speed}, with {best:g}{_client(most)}"


def _holds(level: LevelReport) -> bool:
    return not level.slo or level.holds_slo


def _answered_share(level: LevelReport) -> float:
    """Of the requests that are due in a second, as many as are answered in one: the others wait longer and longer."""
    return level.succeeded / max(1, level.requests) / (1 + max(0.0, level.falling_behind or 0.0))


def _client(level: LevelReport) -> str:
    return ", but the client itself was the limit" if is_limit(level) else ""


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")
