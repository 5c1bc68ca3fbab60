"""`Tally`: a level under way in numbers: what is done, how long it took, how fast tokens come, what failed.

Does: count finished requests and estimate percentiles from counts in narrow steps, so that a look at them costs the same after
a million tokens as after ten. Does not: show (`progress.py`), or replace the report, which is computed from all values.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Literal, Protocol

from tonle.bench.measure import Sample
from tonle.bench.underway import UnderwayCounts

Unit = Literal["tok/s", "req/s"]

STEP = 0.02  # of a latency: what percentiles are off by at most
MAX_GAPS = 64  # of one answer that are counted, evenly chosen
NUM_SPEEDS = 40  # kept


class Labelled(Protocol):
    """A level's `Load`, or a `Scenario`."""

    @property
    def label(self) -> str: ...


class LatencyCounts:
    """How many latencies fell into each step of 2 %."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._total = 0

    def add(self, seconds: Iterable[float]) -> None:
        for value in seconds:
            self._counts[math.floor(math.log(max(value, 1e-6)) / STEP)] += 1
            self._total += 1

    def percentile_ms(self, percent: float) -> float | None:
        """The middle of the step that holds it; None if nothing was counted."""
        place = (self._total - 1) * percent / 100
        for step in sorted(self._counts):
            place -= self._counts[step]
            if place < 0:
                return 1e3 * math.exp((step + 0.5) * STEP)
        return None


class Tally:
    """Owns the counts of the level, or the scenario, under way."""

    def __init__(self, load: Labelled, num_requests: int | None, duration_s: float | None, unit: Unit) -> None:
        self.load = load
        self.unit = unit
        self.num_requests = num_requests
        self.duration_s = duration_s
        self.begin_s = monotonic()
        self.num_done = 0
        self.num_failed = 0
        self.output_tokens = 0
        self._chunks = 0  # of answered requests
        self.chunks_before = 0  # that came before the level, in its warm-up
        self.ttft, self.itl, self.e2el = LatencyCounts(), LatencyCounts(), LatencyCounts()
        self.failures: Counter[str] = Counter()  # by kind
        self.speeds: deque[float] = deque(maxlen=NUM_SPEEDS)  # output per second between looks, the latest last
        self._last = (self.begin_s, 0.0)

    def add(self, sample: Sample) -> None:
        self.num_done += 1
        if sample.failure is not None:
            self.num_failed += 1
            self.failures[sample.failure.partition(": ")[0]] += 1
            return
        self.output_tokens += sample.output_tokens
        self._chunks += len(sample.arrivals_s)
        if sample.ttft_s is not None:
            self.ttft.add([sample.ttft_s])
        if sample.e2el_s is not None:
            self.e2el.add([sample.e2el_s])
        arrivals, step = sample.arrivals_s, max(1, len(sample.arrivals_s) // MAX_GAPS)
        self.itl.add(arrivals[place + 1] - arrivals[place] for place in range(0, len(arrivals) - 1, step))

    def look(self, counts: UnderwayCounts | None) -> None:
        """Note how much has come since the last look. `counts` None: only finished requests are known."""
        now_s, before = monotonic(), self._last
        if self.unit == "req/s":
            output = float(self.num_done - self.num_failed)
        elif counts is None or counts.chunks <= self.chunks_before:
            output = float(self.output_tokens)
        else:  # a chunk may have several tokens
            output = (counts.chunks - self.chunks_before) * (self.output_tokens / self._chunks if self._chunks else 1.0)
        self._last = (now_s, output)
        if now_s > before[0]:
            self.speeds.append(max(0.0, output - before[1]) / (now_s - before[0]))

    @property
    def elapsed_s(self) -> float:
        return monotonic() - self.begin_s

    @property
    def speed(self) -> float:
        """Of finished requests, since the level began."""
        done = self.output_tokens if self.unit == "tok/s" else self.num_done - self.num_failed
        return done / max(self.elapsed_s, 1e-9)

    @property
    def mean_speed(self) -> float:
        """Up to the last look, with requests under way."""
        return self._last[1] / max(self._last[0] - self.begin_s, 1e-9)

    @property
    def share_done(self) -> float | None:
        """0 to 1; None: it has no known end."""
        shares = []
        if self.num_requests:
            shares.append(self.num_done / self.num_requests)
        if self.duration_s:
            shares.append(self.elapsed_s / self.duration_s)
        return min(1.0, max(shares)) if shares else None

    @property
    def left_s(self) -> float | None:
        """How long it will take at this pace; None: not known yet."""
        ways = []
        if self.num_requests and self.num_done:
            ways.append(self.elapsed_s * (self.num_requests - self.num_done) / self.num_done)
        if self.duration_s:
            ways.append(max(0.0, self.duration_s - self.elapsed_s))
        return min(ways) if ways else None

    def __str__(self) -> str:
        of = "" if self.num_requests is None else f"/{self.num_requests}"
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        return f"{self.num_done}{of} requests, {self.speed:.1f} {self.unit}{failed}"


Follow = Callable[[], UnderwayCounts]
