"""`Sampler`: what happens in the current second; when that is over, a `Sample` of it.

Does: count ended requests, many at a time, read the backends' state, close a second by a timer of the event loop, tell
listeners. Does not: keep samples (`history.py`) or fetch what backends tell (`gateway/backends/scraper.py`).

Tokens are counted once: by the counters of a backend where it tells them, which is smooth, else when a request ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Protocol

from tonle.observe.backend_counters import BackendCounters
from tonle.observe.backend_state import BackendState
from tonle.observe.sample import Sample, reading
from tonle.observe.seen_request import SeenRequest
from tonle.observe.sketch import Sketch
from tonle.telemetry.fine_buckets import buckets_of

log = logging.getLogger("tonle.observe")

SCRAPE_S = 5.0  # between two readings of a backend elsewhere
RECENT_S = 60  # of errors and prefix misses by reason
MOST_SHOWN = 100  # requests of a second that are passed on whole
MOST_ERRORS = 50  # codes that are told apart in a second: a backend may invent them
_OTHER = "other"
_FAILED = ("failed", "interrupted")
_MOST_STALLED_S = 60  # an event loop that stands still for longer leaves a gap, as a machine that sleeps does
_HOUR_S = 3600.0

Listener = Callable[[Sample], None]


class Queue(Protocol):
    @property
    def num_inside(self) -> int: ...
    @property
    def num_queued(self) -> int: ...


class WatchedBackend(Protocol):
    """The part of a gateway's `Backend` that is looked at."""

    @property
    def name(self) -> str: ...
    @property
    def local(self) -> bool: ...
    @property
    def is_up(self) -> bool: ...
    @property
    def gate(self) -> Queue: ...
    @property
    def price_per_hour(self) -> float | None: ...


class Gaps(Protocol):
    """Gaps between tokens, of an engine in this process: `telemetry.metrics.TokenGaps`."""

    @property
    def counts(self) -> list[int]: ...
    @property
    def buckets(self) -> list[int]: ...


class Sampler:
    """For the thread of the event loop."""

    def __init__(
        self,
        backends: Sequence[WatchedBackend] = (),
        *,
        read_local: Callable[[], BackendState] | None = None,
        gaps: Gaps | None = None,
        burn_rate: Callable[[], float | None] = lambda: None,
        patience_s: float = 2.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`backends` may come and go. `read_local`: the state of the engine in this process. `patience_s`: a caller that gave up
        after longer counts as a latency."""
        self._backends = backends
        self._read_local = read_local
        self._gaps = gaps
        self._gaps_before = [] if gaps is None else gaps.counts.copy()
        self._burn_rate = burn_rate
        self._patience_s = patience_s
        self._clock = clock  # unix seconds
        self._counters: dict[str, BackendCounters] = {}  # by backend, of those that are there
        self.states: dict[str, BackendState] = {}  # by backend; absent: it does not tell
        self._open = Sample(int(clock()))
        self._ended: deque[SeenRequest] = deque(maxlen=MOST_SHOWN)
        self._errors: Counter[str] = Counter()
        self._past_errors: deque[Counter[str]] = deque(maxlen=RECENT_S)
        self._past_missed: deque[dict[str, int]] = deque(maxlen=RECENT_S)
        self._past_samples: deque[Sample] = deque(maxlen=RECENT_S)
        self.ended: list[SeenRequest] = []  # in the second that was closed last, the latest 100 at most
        self.latest: Sample | None = None  # that was closed
        self._listeners: list[Listener] = []
        # Has those counted that ended and were kept back, before the second ends or they would be counted otherwise.
        self.collect: Callable[[], None] = lambda: None
        self._timer: asyncio.TimerHandle | None = None

    # -- what is told

    def count(self, requests: Sequence[SeenRequest]) -> None:
        """Requests have ended. All are counted, or none of them, where it fails: this second's sums come last."""
        failed = refused = lookups = hits = priced = 0
        prompt_tokens = output_tokens = 0
        cost = 0.0
        errors: list[str] = []
        backend, told = "", self._counters.get("")
        for seen in requests:
            status = seen.status
            if status != "ok":
                failed += status in _FAILED
                refused += status == "refused"
            if seen.error:
                errors.append(seen.error)
            if seen.cache != "bypass":
                lookups += 1
                hits += seen.cache == "hit"
            if seen.cost is not None:
                cost += seen.cost
                priced += 1
            if status != "cached":
                if seen.backend != backend:
                    backend = seen.backend
                    told = self._counters.get(backend)
                if told is None or not (told.count_tokens or seen.arrived + (seen.sent_s or 0.0) < told.since):
                    prompt_tokens += seen.prompt_tokens
                    output_tokens += seen.completion_tokens
        latencies = self._latencies(requests)
        sample = self._open
        for whole, added in zip((sample.e2e, sample.ttft, sample.itl), latencies, strict=True):
            whole.merge(added)
        sample.requests += len(requests)
        sample.failed += failed
        sample.refused += refused
        sample.cache_lookups += lookups
        sample.cache_hits += hits
        sample.cost += cost
        sample.num_priced += priced
        sample.prompt_tokens += prompt_tokens
        sample.output_tokens += output_tokens
        for code in errors:
            self._count_error(code)
        self._ended.extend(requests[-MOST_SHOWN:])

    def _latencies(self, requests: Sequence[SeenRequest]) -> tuple[Sketch, Sketch, Sketch]:
        """Whole times, times to the first token and gaps between tokens, in seconds."""
        e2e: list[float] = []
        ttft: list[float] = []
        itl: list[float] = []
        num_gaps: list[int] = []  # of each in `itl`
        gaps_known = self._gaps is not None  # the engine of this process counts its own
        for seen in requests:
            # As `GatewayMetrics`: a refusal does not say how fast we are, nor a hang-up, unless its caller had waited too long.
            if not seen.computed:
                continue
            status = seen.status
            if status == "ok" or status == "cached" or status == "failed":
                e2e.append(seen.total_s)
                if (ttft_s := seen.ttft_s) is None:
                    continue
                ttft.append(ttft_s)
                last_s, gaps = seen.last_s, seen.completion_tokens - seen.num_answers
                if gaps > 0 and last_s is not None and status != "cached" and not (gaps_known and seen.is_local):
                    # `SeenRequest.itl_s`, without its call
                    itl.append((last_s - ttft_s) * seen.num_answers / gaps if last_s > ttft_s else 0.0)
                    num_gaps.append(gaps)
            elif status == "cancelled" and seen.total_s > self._patience_s:
                e2e.append(seen.total_s)
        gap_times: dict[int, int] = {}  # as `Sketch.add_bucket`, without a call for each
        for bucket, gaps in zip(buckets_of(itl), num_gaps, strict=True):
            gap_times[bucket] = gap_times.get(bucket, 0) + gaps
        return Sketch.of(e2e), Sketch.of(ttft), Sketch(gap_times)

    def _count_error(self, code: str) -> None:
        errors = self._errors
        errors[code if code in errors or len(errors) < MOST_ERRORS else _OTHER] += 1

    def told(self, state: BackendState) -> None:
        """A backend has told its state. From now on its tokens may be counted otherwise."""
        self.collect()
        self.states[state.name] = state
        self._counters_of(state.name).told(state)

    def lost(self, name: str) -> None:
        """It could not be asked."""
        self.collect()
        self.states.pop(name, None)
        self._counters_of(name).lost(self._clock())

    def _counters_of(self, name: str) -> BackendCounters:
        if (counters := self._counters.get(name)) is None:
            is_local = any(backend.local for backend in self._backends if backend.name == name)
            counters = self._counters[name] = BackendCounters(1.0 if is_local else SCRAPE_S)
        return counters

    def _forget_absent(self) -> None:
        """What backends told that are gone."""
        for name in self._counters.keys() - {backend.name for backend in self._backends}:
            del self._counters[name]
            self.states.pop(name, None)

    # -- what can be asked

    def errors(self) -> dict[str, int]:
        """Requests that ended with an error in the last minute, by its code; most frequent first."""
        return dict(sum(self._past_errors, Counter()).most_common())

    def prefix_missed(self) -> dict[str, int]:
        """Prompt tokens that were not found in prefix caches in the last minute, by reason."""
        total: Counter[str] = Counter()
        for missed in self._past_missed:
            total.update(missed)
        return dict(total)

    def percentiles(self) -> dict[str, float | None]:
        """p50, p95 and p99 of the last minute's latencies, in seconds: `ttft_p95`, …; None where there was no request."""
        found: dict[str, float | None] = {}
        since = self._open.t - RECENT_S
        for name in ("ttft", "itl", "e2e"):
            whole = Sketch()
            for sample in self._past_samples:
                if sample.t >= since:
                    whole.merge(getattr(sample, name))
            found |= zip((f"{name}_p50", f"{name}_p95", f"{name}_p99"), whole.percentiles(50, 95, 99), strict=True)
        return found

    def listen(self, callback: Listener) -> Callable[[], None]:
        """Have it called with each sample. Returns the function that ends that."""
        self._listeners.append(callback)

        def end() -> None:
            if callback in self._listeners:
                self._listeners.remove(callback)

        return end

    # -- the end of a second

    def start(self) -> None:
        self._open.t = int(self._clock())
        self._schedule()

    def stop(self) -> None:
        """The second under way is closed early."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self.close_until(self._open.t + 1)

    def _schedule(self) -> None:
        now = self._clock()
        self._timer = asyncio.get_running_loop().call_later(1.001 - now % 1, self._tick)

    def _tick(self) -> None:
        try:
            self.close_until(int(self._clock()))
        except Exception:
            log.exception("a second could not be summed up")
        self._schedule()

    def close_until(self, now: int) -> None:
        """Close the seconds before `now`, in unix seconds."""
        closed = self._open
        if now == closed.t:
            return
        if now < closed.t:  # the clock was set back
            closed.t = now
            return
        self.collect()
        self._open = Sample(now)
        self._finish(closed)
        self.latest = closed
        self._tell(closed)
        stalled_s = now - closed.t - 1
        if stalled_s <= _MOST_STALLED_S:
            for t in range(closed.t + 1, now):  # the server ran, though nothing could be counted
                self._tell(Sample(t))

    def _finish(self, sample: Sample) -> None:
        self.ended = list(self._ended)
        self._ended.clear()
        self._past_errors.append(self._errors)
        self._errors = Counter()
        if self._read_local is not None:
            self.told(self._read_local())
        self._forget_absent()
        missed: Counter[str] = Counter()
        for backend in self._backends:
            missed.update(self._counters_of(backend.name).take(sample))
            if backend.price_per_hour is not None and backend.is_up:
                sample.machine_cost += backend.price_per_hour / _HOUR_S
        self._past_missed.append(missed)
        self._add_gaps(sample)
        self._read_states(sample)
        sample.burn_rate = reading(self._burn_rate())
        self._past_samples.append(sample)

    def _add_gaps(self, sample: Sample) -> None:
        if self._gaps is None or self._gaps.counts == self._gaps_before:
            return
        before, self._gaps_before = self._gaps_before, self._gaps.counts.copy()
        for bucket, old, new in zip(self._gaps.buckets, before, self._gaps_before, strict=True):
            if new != old:
                sample.itl.add_bucket(bucket, new - old)

    def _read_states(self, sample: Sample) -> None:
        """Of all backends together: sums of requests and memory, means of shares."""
        running = waiting = 0
        for backend in self._backends:
            state, queue = self.states.get(backend.name), backend.gate
            told = None if state is None else state.running
            running += queue.num_inside if told is None else told
            waiting += queue.num_queued + (0 if state is None else state.waiting or 0)
        sample.running, sample.waiting = reading(running), reading(waiting)
        states = self.states.values()
        sample.kv_usage = reading(_mean([state.kv_usage for state in states]))
        sample.gpu_utilization = reading(_mean([state.gpu_utilization for state in states]))
        sample.gpu_memory_used = reading(_sum([state.gpu_memory_used for state in states]))
        sample.gpu_memory_total = reading(_sum([state.gpu_memory_total for state in states]))

    def _tell(self, sample: Sample) -> None:
        for listener in tuple(self._listeners):
            try:
                listener(sample)
            except Exception:
                log.exception("a listener of samples failed")


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
