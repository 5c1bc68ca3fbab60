"""`TargetWindow`: the requests of the last minutes held against one latency target.

Does: count those beyond it, estimate a percentile, and say which part of their time the excess lies in, and at which backend.
Does not: read a clock or keep single requests, but for the latest, which are counted together because that is cheaper: what it
keeps are counts and sums of ten seconds each.

The excess of a part is what slow requests spent in it beyond what the others spent there on average. The largest part of a slow
request is often the one that all requests need, and not the one that made it slow.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

# Where a request's time goes. `backend`: before the first token of a backend that does not say how it divides.
Part = Literal["gateway", "queueing", "prefill", "backend", "decode", "stalls", "preemption", "delivery"]
PARTS: tuple[Part, ...] = get_args(Part)
Parts = Sequence[float]  # seconds of each of `PARTS`; 0 for one that is not known
NO_PARTS = (0.0,) * len(PARTS)

SLOT_S = 10.0
MOST_UNCOUNTED = 250  # requests of a window that wait to be counted together
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
        self.buckets: Counter[int] = Counter()
        self.within: Parts = NO_PARTS  # of the requests within the target
        self.slow: dict[str, Parts] = {}  # backend -> of the requests beyond it
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
        self.within = _plus(self.within, other.within, sign)
        for backend, count in other.slow_at.items():
            if left := self.slow_at.get(backend, 0) + sign * count:
                self.slow_at[backend] = left
                self.slow[backend] = _plus(self.slow.get(backend, NO_PARTS), other.slow[backend], sign)
            else:
                self.slow_at.pop(backend, None)
                self.slow.pop(backend, None)


def _plus(parts: Parts, others: Parts, times: float) -> Parts:
    return [seconds + times * other for seconds, other in zip(parts, others, strict=True)]


class TargetWindow:
    """`seconds` long; times are those of one monotonic clock."""

    def __init__(self, target_s: float, seconds: float) -> None:
        self.target_s = target_s
        self._num_slots = math.ceil(seconds / SLOT_S)
        self._past: deque[tuple[int, _Sums]] = deque()  # number of the slot, oldest first
        self._number = 0
        self._current = _Sums()  # of the slot `_number`, without `_uncounted`
        self._uncounted: list[tuple[float, str, Parts]] = []  # value, backend, parts
        self._total = _Sums()  # of `_past`

    def add(self, now_s: float, value_s: float, backend: str, parts: Parts) -> None:
        if int(now_s / SLOT_S) != self._number:
            self._turn(now_s)
        self._uncounted.append((value_s, backend, parts))
        if len(self._uncounted) >= MOST_UNCOUNTED:
            self._count()

    def _count(self) -> None:
        if not (requests := self._uncounted):
            return
        self._uncounted = []
        sums, target_s = self._current, self.target_s
        sums.count += len(requests)
        sums.buckets.update(_buckets([value_s for value_s, _, _ in requests]))
        if within := [parts for value_s, _, parts in requests if value_s <= target_s]:
            sums.within = _plus(sums.within, [sum(seconds) for seconds in zip(*within, strict=True)], 1)
        for value_s, backend, parts in requests:
            if value_s > target_s:
                sums.num_slow += 1
                sums.slow_at[backend] = sums.slow_at.get(backend, 0) + 1
                sums.slow[backend] = _plus(sums.slow.get(backend, NO_PARTS), parts, 1)

    def read(self, now_s: float) -> WindowState:
        self._turn(now_s)
        self._count()
        sums = _Sums()
        sums.merge(self._total, 1)
        sums.merge(self._current, 1)
        return WindowState(sums)

    def _turn(self, now_s: float) -> None:
        """Close the slot that has passed, and drop those that are too old."""
        number = int(now_s / SLOT_S)
        if number == self._number:
            return
        self._count()
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
        if not sums.slow:
            return None
        usual = _plus(NO_PARTS, sums.within, 1 / max(1, sums.count - sums.num_slow))
        at = {backend: _plus(parts, usual, -sums.slow_at[backend]) for backend, parts in sums.slow.items()}
        total = [sum(seconds) for seconds in zip(*at.values(), strict=True)]
        part = max(range(len(PARTS)), key=total.__getitem__)
        backend = max(at, key=lambda name: at[name][part])
        return Excess(PARTS[part], backend if 2 * at[backend][part] > total[part] else "")


def _buckets(values: list[float]) -> list[int]:
    ceil, log = math.ceil, math.log
    return [ceil(log(value_s if value_s > 1e-6 else 1e-6) / _GROWTH) for value_s in values]


def _middle(bucket: int) -> float:
    return math.exp((bucket - 0.5) * _GROWTH)
