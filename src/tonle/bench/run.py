"""`Bench`: one benchmark from the first question to the report. `run_bench` runs it for callers without an event loop.

Does: explore → for every level: warm up, drive, report. Does not: print; a `Watch` is told what happens.
Runs: in the caller's thread, on uvloop where it is installed. Ctrl-C ends it early with what has been measured.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Protocol, runtime_checkable

from tonle.bench.client import Client, LevelTask, Sender
from tonle.bench.client_processes import ClientProcesses
from tonle.bench.drive import closed_loop
from tonle.bench.gpu_watch import GpuWatch, is_this_machine
from tonle.bench.load import Load
from tonle.bench.measure import Circumstances, LevelReport, Sample, report_level
from tonle.bench.options import BenchOptions
from tonle.bench.report import BenchReport, describe_environment, describe_settings, remark
from tonle.bench.target import Target, explore
from tonle.bench.underway import UnderwayCounts
from tonle.telemetry.gpu import LocalGpus

WARMUP_USERS_OPEN_LOOP = 4


class Watch(Protocol):
    """Is told how a benchmark goes, between network reads: must be quick."""

    def started(self, load: Load, num_requests: int | None, duration_s: float | None) -> None: ...
    def answered(self, sample: Sample) -> None: ...
    def finished(self, level: LevelReport) -> None: ...


@runtime_checkable
class Follower(Protocol):
    """A watch that looks at what is under way too."""

    def follow(self, underway: Callable[[], UnderwayCounts]) -> None: ...


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
        self._client = Client(options)  # asks about the server and warms it up; in one process, it is the sender too
        self._sender: Sender = self._client if options.processes == 1 else ClientProcesses(options)
        if isinstance(self._watch, Follower):
            self._watch.follow(self._sender.underway)
        self._sweep = None if options.sweep is None else options.new_sweep()
        self._gpus: LocalGpus | None = None
        self._target: Target | None = None
        self._levels: list[tuple[Load, LevelReport]] = []
        self._started_at = datetime.now(UTC)

    async def run(self) -> BenchReport:
        """Measure all levels. Cancelling stops it; `report` then has what was measured so far."""
        try:
            self._target = await explore(self._client.http, self._options)
            if is_this_machine(self._client.http.address.host):
                self._gpus = LocalGpus()
            for number, load in enumerate(self._loads()):
                await self._warm_up(self._target, number, load)
                await self._run_level(LevelTask(self._target.workload, number, load))
        finally:
            await self._sender.close()
            await self._client.close()
        return self.report()

    def report(self, *, interrupted: bool = False) -> BenchReport:
        target = self._target
        notes = list(target.notes) if target is not None else []
        levels = self._levels if self._sweep is None else sorted(self._levels, key=lambda each: each[0].value)
        notes += remark([level for _, level in levels], self._options)
        if self._sweep is not None:
            notes += self._sweep.notes()
        if target is not None:
            notes += target.workload.notes()
        return BenchReport(
            started_at=self._started_at.isoformat(timespec="seconds"),
            url=str(self._client.http.address),
            model=None if target is None else target.model,
            prompt_kind=None if target is None else target.workload.kind,
            settings=describe_settings(self._options),
            environment=describe_environment(self._event_loop),
            levels=[level for _, level in levels],
            notes=notes,
            interrupted=interrupted,
            saturation=None if self._sweep is None else self._sweep.saturation(interrupted=interrupted),
            request_kind=self._options.kind,
        )

    def _loads(self) -> Iterator[Load]:
        """A sweep's next load depends on the levels before it."""
        if self._sweep is None:
            yield from self._options.levels
            return
        while (load := self._sweep.next_load()) is not None:
            yield load

    async def _warm_up(self, target: Target, number: int, load: Load) -> None:
        """Send requests that are not counted; what fails here fails again, and is counted, in the level."""
        users = WARMUP_USERS_OPEN_LOOP if load.users is None else load.users
        jobs = itertools.islice(target.workload.jobs(number, "warmup"), self._options.warmup)
        await closed_loop(jobs, users=min(users, self._options.warmup), send=self._client.send, keep=lambda _: None)

    async def _run_level(self, task: LevelTask) -> None:
        load = task.load
        num_requests = task.workload.num_requests(task.number, self._options.num_requests(load))
        await self._sender.prepare(task)
        samples: list[Sample] = []

        def keep(sample: Sample) -> None:
            samples.append(sample)
            self._watch.answered(sample)

        self._watch.started(load, num_requests, self._options.duration_s)
        reconnects = self._sender.reconnects
        gpus = GpuWatch(self._gpus) if self._gpus is not None and self._gpus.names else None
        interrupted = True
        try:
            await self._sender.drive(keep)
            interrupted = False
        finally:
            circumstances = Circumstances(
                label=load.label,
                concurrency=load.users,
                rate=load.rate,
                reconnects=self._sender.reconnects - reconnects,
                interrupted=interrupted,
                warmup=0 if load.kind == "replay" else self._options.warmup,
                slo=self._options.slo,
                gpus=[] if gpus is None else gpus.stop(),
                clients=self._sender.uses(),
            )
            level = report_level(samples, circumstances, keep_rows=self._options.keep_requests)
            self._levels.append((load, level))
            if self._sweep is not None and not interrupted:
                self._sweep.add(load, level)
            self._watch.finished(level)


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
