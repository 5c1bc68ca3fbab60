"""`Bench`: one benchmark from the first question to the report. `run_bench` runs it for callers without an event loop.

Does: explore → for every level: warm up, drive, report. Does not: print; a `Watch` is told what happens.
Runs: in the caller's thread, on uvloop where it is installed. Ctrl-C ends it early with what has been measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from time import thread_time
from typing import Protocol

from tonle.bench.drive import Keep, closed_loop, open_loop, send_job
from tonle.bench.load import Load
from tonle.bench.measure import Circumstances, LevelReport, Sample, report_level
from tonle.bench.options import BenchOptions
from tonle.bench.report import BenchReport, describe_environment, describe_settings, remark
from tonle.bench.target import Target, explore
from tonle.bench.workload import Job
from tonle.edge.client import Address, HttpClient, UpstreamError

WARMUP_USERS_OPEN_LOOP = 4
MAX_JOBS_AHEAD = 4096


class Watch(Protocol):
    """Is told how a benchmark goes, between network reads: must be quick."""

    def started(self, load: Load, num_requests: int | None, duration_s: float | None) -> None: ...
    def answered(self, sample: Sample) -> None: ...
    def finished(self, level: LevelReport) -> None: ...


class NoWatch:
    """Ignores everything."""

    def started(self, load: Load, num_requests: int | None, duration_s: float | None) -> None: ...
    def answered(self, sample: Sample) -> None: ...
    def finished(self, level: LevelReport) -> None: ...


class Bench:
    """Owns one benchmark. `report` is valid at any moment, also after `run` was cancelled."""

    def __init__(self, options: BenchOptions, watch: Watch | None = None, *, event_loop: str = "asyncio") -> None:
        options.validate()
        self._options = options
        self._watch = watch or NoWatch()
        self._event_loop = event_loop
        address = Address.parse(options.url, scheme="http")
        self._client = HttpClient(address, api_key=options.api_key, verify_tls=options.verify_tls, resend=True)
        self._target: Target | None = None
        self._levels: list[LevelReport] = []
        self._started_at = datetime.now(UTC)

    async def run(self) -> BenchReport:
        """Measure all levels. Cancelling stops it; `report` then has what was measured so far."""
        try:
            self._target = await explore(self._client, self._options)
            for number, load in enumerate(self._options.levels):
                await self._warm_up(self._target, number, load)
                await self._run_level(self._target, number, load)
        finally:
            self._client.close()
        return self.report()

    def report(self, *, interrupted: bool = False) -> BenchReport:
        target = self._target
        notes = list(target.notes) if target is not None else []
        for level in self._levels:
            notes += remark(level, self._options)
        if target is not None:
            notes += target.workload.notes()
        return BenchReport(
            started_at=self._started_at.isoformat(timespec="seconds"),
            url=str(self._client.address),
            model=None if target is None else target.model,
            prompt_kind=None if target is None else target.workload.kind,
            settings=describe_settings(self._options),
            environment=describe_environment(self._event_loop),
            levels=list(self._levels),
            notes=notes,
            interrupted=interrupted,
        )

    async def _send(self, job: Job) -> Sample:
        return await send_job(self._client, job, timeout_s=self._options.timeout_s)

    async def _warm_up(self, target: Target, number: int, load: Load) -> None:
        """Send requests that are not counted; what fails here fails again, and is counted, in the level."""
        users = int(load.value) if load.kind == "concurrency" else WARMUP_USERS_OPEN_LOOP
        jobs = itertools.islice(target.workload.jobs(number, "warmup"), self._options.warmup)
        await closed_loop(jobs, users=min(users, self._options.warmup), send=self._send, keep=lambda _: None)

    async def _run_level(self, target: Target, number: int, load: Load) -> None:
        num_requests = self._options.num_requests(load)
        jobs = target.workload.jobs(number, "run")
        if num_requests is not None:
            # Made now, so that it takes nothing of the measured time; a very long run makes the rest as it goes.
            ahead = list(itertools.islice(jobs, min(num_requests, MAX_JOBS_AHEAD)))
            jobs = itertools.chain(ahead, itertools.islice(jobs, num_requests - len(ahead)))
            num_requests += sum(job.num_requests - 1 for job in ahead)  # each job was counted as one
        if load.kind == "concurrency":
            with contextlib.suppress(UpstreamError):  # the requests report it
                await self._client.prepare(int(load.value))
        samples: list[Sample] = []

        def keep(sample: Sample) -> None:
            samples.append(sample)
            self._watch.answered(sample)

        self._watch.started(load, num_requests, self._options.duration_s)
        reconnects, cpu_s = self._client.reconnects, thread_time()
        interrupted = True
        try:
            await self._drive(number, load, jobs, keep)
            interrupted = False
        finally:
            circumstances = Circumstances(
                label=load.label,
                concurrency=int(load.value) if load.kind == "concurrency" else None,
                rate=load.value if load.kind == "rate" else None,
                reconnects=self._client.reconnects - reconnects,
                client_cpu_s=thread_time() - cpu_s,
                interrupted=interrupted,
            )
            self._levels.append(report_level(samples, circumstances, keep_rows=self._options.keep_requests))
            self._watch.finished(self._levels[-1])

    async def _drive(self, number: int, load: Load, jobs: Iterator[Job], keep: Keep) -> None:
        duration_s = self._options.duration_s
        if load.kind == "concurrency":
            await closed_loop(jobs, users=int(load.value), send=self._send, keep=keep, duration_s=duration_s)
        else:
            rng = random.Random(f"{self._options.seed}/{number}/arrivals")
            rate = load.value if load.kind == "rate" else None
            await open_loop(jobs, rate=rate, rng=rng, send=self._send, keep=keep, duration_s=duration_s)


def run_bench(options: BenchOptions, watch: Watch | None = None) -> BenchReport:
    """Run a benchmark to its end, or to Ctrl-C: then the report says `interrupted` and holds what was measured.

    Raises `ConfigError` if it cannot start: a setting makes no sense, the file has a bad line, the server does not answer.
    Inside a running event loop use `await Bench(options).run()`.
    """
    check_no_loop("run_bench", "await Bench(options).run()")
    factory, name = fastest_loop()
    bench = Bench(options, watch, event_loop=name)
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(bench.run())
    except KeyboardInterrupt:
        return bench.report(interrupted=True)


def check_no_loop(function: str, instead: str) -> None:
    """Raises `RuntimeError` inside a running event loop, as in a notebook, before a coroutine is made in vain."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        f"{function}() starts an event loop of its own, and one is running in this thread already, as in a notebook; "
        f"there, use: report = {instead}"
    )


def fastest_loop() -> tuple[Callable[[], asyncio.AbstractEventLoop] | None, str]:
    """A factory for `asyncio.Runner`, and the loop's name."""
    try:
        import uvloop
    except ImportError:
        return None, "asyncio"
    return uvloop.new_event_loop, f"uvloop {version('uvloop')}"
