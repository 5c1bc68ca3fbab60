"""`Slo`: what latencies must hold, such as "95 of 100 first tokens within 200 ms", and what it means for a request and a level.

Does: read the notation of the command line (`ttft-p95=200ms`), say whether one request is good and whether a level holds.
Does not: measure, or know where latencies come from: a server, a simulation and a prediction are judged alike.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from tonle.errors import ConfigError
from tonle.telemetry.percentile import percentile

Metric = Literal["ttft", "tpot", "itl", "e2el"]
METRICS: tuple[Metric, ...] = get_args(Metric)
MOST_FAILED = 0.05  # share of requests: with more, nothing holds an SLO, also where no bound counts those that failed
_UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4, "min": 6e4, "h": 3.6e6, "": 1.0}


class Bound(msgspec.Struct, frozen=True):
    """So many of 100 (`percent`) must be at most `limit_ms`."""

    metric: Metric
    percent: float
    limit_ms: float

    def __str__(self) -> str:
        return f"{self.metric.upper()} p{self.percent:g} ≤ {duration_text(self.limit_ms)}"


class Latencies(msgspec.Struct, frozen=True):
    """Of one answered request, in milliseconds. None: it has none (one token has no TPOT)."""

    ttft_ms: float | None
    tpot_ms: float | None
    e2el_ms: float | None
    itl_ms: Sequence[float] = ()


class BoundResult(msgspec.Struct, frozen=True):
    """One bound, and what came of it. `value_ms` None: no request got that far."""

    bound: Bound
    value_ms: float | None
    holds: bool

    def __str__(self) -> str:
        return f"{self.bound}: {self.value_text}, {'held' if self.holds else 'missed'}"

    @property
    def value_text(self) -> str:
        """Where a failed request counts as slower than any answer, enough of them leave a percentile without a value."""
        if self.value_ms is not None:
            return duration_text(self.value_ms)
        if self.holds or self.bound.metric not in ("ttft", "e2el"):
            return "no value"
        share = 100 - self.bound.percent
        return f"no value, since {f'{share:g} % or more of the ' if share else ''}requests failed"


class Slo(msgspec.Struct, frozen=True):
    bounds: tuple[Bound, ...] = ()

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Slo:
        """Read `ttft-p95=200ms`, `itl-p99=50ms`, `e2el-p99=8s`. Raises `ConfigError`."""
        return cls(tuple(_parse_bound(text) for text in texts))

    def __bool__(self) -> bool:
        return bool(self.bounds)

    def __str__(self) -> str:
        return ", ".join(str(bound) for bound in self.bounds)

    def is_good(self, request: Latencies) -> bool:
        """Whether this answered request keeps every limit: of gaps between tokens, the bound's percentile of its own."""
        return all(_value(bound, request) <= bound.limit_ms for bound in self.bounds)

    def judge(self, requests: Sequence[Latencies], num_failed: int = 0) -> list[BoundResult]:
        """Each bound over all requests. For TTFT and E2EL a request that failed counts as slower than any answer; it has no
        time per token and no gaps."""
        results = []
        for bound in self.bounds:
            if bound.metric == "itl":
                values = [gap for request in requests for gap in request.itl_ms]
            else:
                values = [
                    value for request in requests if (value := getattr(request, f"{bound.metric}_ms")) is not None
                ]
            if bound.metric in ("ttft", "e2el"):
                values += [math.inf] * num_failed
            value = percentile(sorted(values), bound.percent) if values else None
            value = None if value is None or not math.isfinite(value) else value
            holds = value is not None and value <= bound.limit_ms if values else not num_failed
            results.append(BoundResult(bound, value, holds))
        return results


NO_SLO = Slo()


def _value(bound: Bound, request: Latencies) -> float:
    if bound.metric == "itl":
        return percentile(sorted(request.itl_ms), bound.percent) if request.itl_ms else 0.0
    value: float | None = getattr(request, f"{bound.metric}_ms")
    return 0.0 if value is None else value


def _parse_bound(text: str) -> Bound:
    match = re.fullmatch(r"\s*(\w+)[-_]p(\d+(?:\.\d+)?)\s*[=:]\s*(.+)", text.lower())
    if match is None or match[1] not in METRICS or not 0 < float(match[2]) <= 100:
        raise ConfigError(
            f"an SLO is written as ttft-p95=200ms (ttft, tpot, itl or e2el; a percentile; a time), not {text!r}",
            param="slo",
        )
    metric: Metric = match[1]
    return Bound(metric, float(match[2]), parse_duration_ms(match[3], "slo"))


def parse_duration_ms(text: str, name: str) -> float:
    """Read `200ms`, `8s`, `1.5 s`, `20m`, `2h` or plain milliseconds. Raises `ConfigError`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS_MS or float(match[1]) <= 0:
        raise ConfigError(f"{name} takes a time such as 200ms, 8s or 20m, not {text!r}", param=name)
    return float(match[1]) * _UNITS_MS[match[2]]


def duration_text(ms: float) -> str:
    """With about three digits, in the unit that suits: `0.82 ms`, `213 ms`, `8.1 s`."""
    if ms >= 1000:
        return f"{ms / 1000:.3g} s" if ms < 1e6 else f"{ms / 1000:.0f} s"
    return f"{ms:.3g} ms"
