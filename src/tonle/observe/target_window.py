"""`TargetWindow`: the requests of the last minutes held against one latency target.

Does: count those beyond it, estimate a percentile, and say which part of their time the excess lies in, and at which backend.
Does not: read a clock or keep single requests: counts and sums of ten seconds each, so that a request costs the same
whatever the load.

The excess of a part is what slow requests spent in it beyond what the others spent there on average. The largest part of a slow
request is often the one that all requests need, and not the one that made it slow.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Literal, NamedTuple

# Where a request's time goes. `backend`: before the first token of a backend that does not say how it divides.
Part = Literal["gateway", "queueing", "prefill", "backend", "decode", "stalls", "preemption", "delivery"]
Parts = dict[Part, float]  # seconds

SLOT_S = 10.0
_GROWTH = math.log(1.02)  # buckets of the percentile: each 2 % wider than the one below


class Excess(NamedTuple):
    """What most of the excess of slow requests is made of."""

    part: Part
    backend: str  # empty: no single backend has most of it


class _Sums:
    """Of the requests of a slot, or of all slots together."""

    def __init__(self) -> None:
        self.count = 0
        self.num_slow = 0
        self.buckets: dict[int, int] = {}
        self.within: Parts = {}  # seconds of the requests within the target
        self.slow: dict[str, Parts] = {}  # backend -> seconds of the requests beyond it
        self.slow_at: dict[str, int] = {}  # backend -> requests beyond it

    def merge(self, other: _Sums, sign: int) -> None:
        """Add it, or with -1 take it away again."""
        self.count += sign * other.count
        self.num_slow += sign * other.num_slow
        for bucket, count in other.buckets.items():
            if left := self.buckets.get(bucket, 0) + sign * count:
                self.buckets[bucket] = left
            else:
                self.buckets.pop(bucket, None)
        _merge(self.within, other.within, sign)
        for backend, count in other.slow_at.items():
            if left := self.slow_at.get(backend, 0) + sign * count:
                self.slow_at[backend] = left
                _merge(self.slow.setdefault(backend, {}), other.slow[backend], sign)
            else:
                self.slow_at.pop(backend, None)
                self.slow.pop(backend, None)


def _merge(into: Parts, parts: Parts, sign: int) -> None:
    for part, seconds in parts.items():
        into[part] = into.get(part, 0.0) + sign * seconds


class TargetWindow:
    """`seconds` long; times are those of one monotonic clock."""

    def __init__(self, target_s: float, seconds: float) -> None:
        self.target_s = target_s
        self._num_slots = math.ceil(seconds / SLOT_S)
        self._past: deque[tuple[int, _Sums]] = deque()  # number of the slot, oldest first
        self._number = 0
        self._current = _Sums()
        self._total = _Sums()  # of `_past`

    def add(self, now_s: float, value_s: float, backend: str, parts: Parts) -> None:
        self._turn(now_s)
        sums = self._current
        sums.count += 1
        bucket = _bucket(value_s)
        sums.buckets[bucket] = sums.buckets.get(bucket, 0) + 1
        if value_s <= self.target_s:
            _merge(sums.within, parts, 1)
            return
        sums.num_slow += 1
        sums.slow_at[backend] = sums.slow_at.get(backend, 0) + 1
        _merge(sums.slow.setdefault(backend, {}), parts, 1)

    def read(self, now_s: float) -> WindowState:
        self._turn(now_s)
        sums = _Sums()
        sums.merge(self._total, 1)
        sums.merge(self._current, 1)
        return WindowState(sums)

    def _turn(self, now_s: float) -> None:
        """Close the slot that has passed, and drop those that are too old."""
        number = int(now_s / SLOT_S)
        if number == self._number:
            return
        if self._current.count:
            self._past.append((self._number, self._current))
            self._total.merge(self._current, 1)
            self._current = _Sums()
        self._number = number
        while self._past and self._past[0][0] <= number - self._num_slots:
            self._total.merge(self._past.popleft()[1], -1)
        if not self._past:
            self._total = _Sums()  # sums of floats drift: begin again from zero


class WindowState:
    """A window at one moment."""

    def __init__(self, sums: _Sums) -> None:
        self._sums = sums
        self.count = sums.count
        self.num_slow = sums.num_slow

    @property
    def slow_share(self) -> float:
        return self.num_slow / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float | None:
        """Within 2 %. None: there was no request."""
        wanted, seen = self.count * percent / 100, 0
        for bucket, count in sorted(self._sums.buckets.items()):
            seen += count
            if seen >= wanted:
                return _middle(bucket)
        return None

    def excess(self) -> Excess | None:
        """None: no request is slow."""
        sums = self._sums
        num_within = sums.count - sums.num_slow
        usual = {part: seconds / num_within for part, seconds in sums.within.items()} if num_within else {}
        at = {
            backend: {part: seconds - usual.get(part, 0.0) * sums.slow_at[backend] for part, seconds in parts.items()}
            for backend, parts in sums.slow.items()
        }
        total: Parts = {}
        for parts in at.values():
            _merge(total, parts, 1)
        if not total:
            return None
        part = max(total, key=lambda name: total[name])
        backend = max(at, key=lambda name: at[name].get(part, 0.0))
        return Excess(part, backend if 2 * at[backend].get(part, 0.0) > total[part] else "")


def _bucket(value_s: float) -> int:
    return math.ceil(math.log(max(value_s, 1e-6)) / _GROWTH)


def _middle(bucket: int) -> float:
    return math.exp((bucket - 0.5) * _GROWTH)
