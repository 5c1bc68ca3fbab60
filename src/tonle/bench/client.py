"""`Client`: one event loop's part of the load. Most benchmarks have one client; `client_processes.py` runs several.

Does: make a level's jobs ahead, open connections, send its share of the jobs, notice whether it keeps up itself.
Does not: summarize, or know of the other clients beyond which jobs are its own.
Runs: on the event loop of the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter, thread_time
from typing import Protocol

from tonle.bench.arrivals import arrival_times
from tonle.bench.drive import Keep, closed_loop, open_loop, send_job
from tonle.bench.load import Load
from tonle.bench.measure import ClientUse, Sample
from tonle.bench.options import BenchOptions
from tonle.bench.underway import Underway, UnderwayCounts
from tonle.bench.workload import Job, Workload
from tonle.edge.client import Address, HttpClient, UpstreamError
from tonle.telemetry.percentile import percentile

MAX_JOBS_AHEAD = 4096
MAX_BYTES_AHEAD = 256 * 1024**2  # of their bodies
TICK_S = 0.02  # between looks at how late the event loop's timers are


@dataclass(frozen=True, slots=True)
class LevelTask:
    """One level, as every client gets it."""

    workload: Workload
    number: int  # of the level: seeds depend on it
    load: Load
    duration_s: float | None = None  # of a closed loop; None: as the options say


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of the load is this client's: the `place`-th of `count`."""

    place: int = 0
    count: int = 1

    def users(self, load: Load) -> int:
        total = int(load.value)
        return total // self.count + (self.place < total % self.count)


WHOLE = Share()


class Sender(Protocol):
    """A `Client`, or several of them behind one face."""

    async def prepare(self, task: LevelTask) -> None:
        """Do what takes time, before the level begins."""

    async def drive(self, keep: Keep) -> None:
        """Send the level's requests; each finished one is given to `keep`. Cancel it to stop early."""

    def uses(self) -> list[ClientUse]:
        """How busy each client was in the level just driven."""

    def underway(self) -> UnderwayCounts:
        """Requests at this moment. May be called in another thread."""

    @property
    def reconnects(self) -> int: ...

    async def close(self) -> None: ...


class Client:
    """Owns the connections, and the state of one level at a time."""

    def __init__(
        self,
        options: BenchOptions,
        http: HttpClient | None = None,
        *,
        share: Share = WHOLE,
        take: Callable[[], int] | None = None,
    ) -> None:
        """`take` gives the place of the next job that no client has taken yet; None: this is the only client."""
        self._options = options
        self.http = connect(options) if http is None else http
        self._share = share
        self._take = take
        self._task: LevelTask | None = None
        self._series = JobSeries(iter(()), None)
        self._timers = TimerCheck()
        self._use: ClientUse | None = None
        self._underway = Underway()

    @property
    def reconnects(self) -> int:
        return self.http.reconnects

    def uses(self) -> list[ClientUse]:
        return [] if self._use is None else [self._use]

    def underway(self) -> UnderwayCounts:
        return self._underway.counts()

    async def prepare(self, task: LevelTask) -> None:
        self._task = task
        self._use = None
        limit = self._options.num_requests(task.load)
        self._series = JobSeries(task.workload.jobs(task.number, "run"), limit)
        self._series.make_ahead()
        if task.load.kind == "concurrency":
            with contextlib.suppress(UpstreamError):  # the requests report it
                await self.http.prepare(self._share.users(task.load))

    async def drive(self, keep: Keep, begin_s: float | None = None) -> None:
        """`begin_s`: from which the moments of an open loop count; None: now."""
        assert self._task is not None, "a level is prepared before it is driven"
        began_s, cpu_s = perf_counter(), thread_time()
        self._timers = TimerCheck()
        watching = asyncio.create_task(self._timers.run())
        try:
            await self._send_all(self._task, keep, began_s if begin_s is None else begin_s)
        finally:
            watching.cancel()
            self._use = self._timers.use((thread_time() - cpu_s) / max(perf_counter() - began_s, 1e-9))

    async def send(self, job: Job) -> Sample:
        return await send_job(self.http, job, timeout_s=self._options.timeout_s, underway=self._underway)

    async def close(self) -> None:
        self.http.close()

    async def _send_all(self, task: LevelTask, keep: Keep, begin_s: float) -> None:
        if task.load.kind == "concurrency":
            users, duration_s = self._share.users(task.load), task.duration_s or self._options.duration_s
            await closed_loop(self._next_jobs(), users=users, send=self.send, keep=keep, duration_s=duration_s)
        else:
            await open_loop(self._timed_jobs(task), begin_s=begin_s, send=self.send, keep=keep)

    def _next_jobs(self) -> Iterator[Job]:
        take = itertools.count().__next__ if self._take is None else self._take
        while (job := self._series.get(take())) is not None:
            yield job

    def _timed_jobs(self, task: LevelTask) -> Iterator[tuple[float, Job]]:
        """Every `count`-th arrival is this client's. The jobs of a replay say when they are due."""
        options, share = self._options, self._share
        if task.load.kind == "replay":
            until_s = float("inf") if options.duration_s is None else options.duration_s
            dated = ((job.due_s or 0.0, job) for job in self._next_jobs())
            yield from itertools.takewhile(lambda timed: timed[0] < until_s, dated)
            return
        arrivals = arrival_times(task.load, seed=options.seed, level=task.number, duration_s=options.duration_s)
        for place, offset_s in enumerate(arrivals):
            if place % share.count == share.place:
                job = self._series.get(place)
                if job is None:
                    return
                yield offset_s, job


class JobSeries:
    """A workload's jobs by their place. Asked for upwards: those that are passed over are made, and dropped."""

    def __init__(self, jobs: Iterator[Job], limit: int | None) -> None:
        """`limit`: how many there are; None: as many as the workload has."""
        self._jobs = jobs
        self._limit = limit
        self._made: deque[Job] = deque()
        self._place = 0  # of the first in `made`

    def make_ahead(self) -> None:
        """So that it takes nothing of the measured time; a very long run makes the rest as it goes."""
        num_bytes = 0
        while (
            self._limit is not None
            and len(self._made) < min(self._limit, MAX_JOBS_AHEAD)
            and num_bytes < MAX_BYTES_AHEAD
        ):
            job = next(self._jobs, None)
            if job is None:
                return
            self._made.append(job)
            num_bytes += len(job.body)

    def get(self, place: int) -> Job | None:
        """None: there are no more."""
        if self._limit is not None and place >= self._limit:
            return None
        job: Job | None = None
        while self._place <= place:
            job = self._made.popleft() if self._made else next(self._jobs, None)
            if job is None:
                return None
            self._place += 1
        return job


class TimerCheck:
    """How late this event loop's timers fire: later than a millisecond or two, and it has more to do than it can."""

    def __init__(self) -> None:
        self._late_s: list[float] = []

    async def run(self) -> None:
        while True:
            due_s = perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            self._late_s.append(max(0.0, perf_counter() - due_s))

    def use(self, cpu_share: float) -> ClientUse:
        late_ms = sorted(1e3 * late_s for late_s in self._late_s) or [0.0]
        return ClientUse(
            cpu_share=round(cpu_share, 4), late_p99_ms=round(percentile(late_ms, 99), 3), late_max_ms=round(late_ms[-1], 3)
        )  # fmt: skip


def connect(options: BenchOptions) -> HttpClient:
    address = Address.parse(options.url, scheme="http")
    return HttpClient(address, api_key=options.api_key, verify_tls=options.verify_tls, resend=True)
