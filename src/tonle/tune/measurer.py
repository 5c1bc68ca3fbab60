"""`Measurer`: measures settings on a real server, and saves each measurement the moment it is there.

Does: start a server with the settings unless one with them runs already, run the benchmark, stop it.
Does not: choose settings or judge them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Protocol

from tonle.bench import BenchOptions, BenchReport, Load, Watch, run_bench
from tonle.bench.server_process import ServerProcess
from tonle.errors import ConfigError, TonleError
from tonle.tune.servers import Launcher
from tonle.tune.space import Settings, describe, key_of
from tonle.tune.state import Measurement, Stage, Tag, TuneDir

# No settings may use up the budget of others: so many times as long as the default's, and at least so many seconds.
_PATIENCE = 4.0
_LEAST_START_S = 120.0
_LEAST_RUN_S = 30.0
_SEEDS_PER_RUN = 1000  # apart: a run of `tonle tune` with the next seed sends other prompts

Say = Callable[[str], None]
RunBench = Callable[[BenchOptions, Watch | None], BenchReport]


class NotMeasured(Exception):  # noqa: N818  (an outcome, not an error of the program)
    """These settings cannot be measured: the server did not start, or no request was answered."""

    def __init__(self, settings: Settings, reason: str) -> None:
        super().__init__(reason)
        self.settings = settings
        self.reason = reason


class Measure(Protocol):
    """What the second stage needs. Tests have one without servers."""

    def measure(
        self, settings: Settings, stage: Stage, round: int, *, requests: int | None, load: Load | None = None
    ) -> Measurement: ...
    def close(self) -> None: ...


class Measurer:
    """Owns the server that runs."""

    def __init__(
        self, launcher: Launcher, options: BenchOptions, folder: TuneDir, say: Say, run: RunBench = run_bench
    ) -> None:
        """`options`: what to send; address, seed and number of requests are set here."""
        self._launcher = launcher
        self._options = options
        self._folder = folder
        self._say = say
        self._run = run
        self._server: ServerProcess | None = None
        self._settings: Settings = {}

    def measure(
        self, settings: Settings, stage: Stage, round: int, *, requests: int | None, load: Load | None = None
    ) -> Measurement:
        """Raises `NotMeasured`; `KeyboardInterrupt` at Ctrl-C, and what was measured of it is dropped."""
        server, startup_s = self._ready(settings)
        options = dataclasses.replace(
            self._options, url=server.url, seed=self._options.seed * _SEEDS_PER_RUN + round, keep_requests=True
        )
        if requests is not None:
            most_s = self._most_run_s(requests) if settings and stage == "search" else None
            options = dataclasses.replace(options, requests=requests, duration_s=most_s)
        if load is not None:
            users = (int(load.value),) if load.kind == "concurrency" else (1,)
            options = dataclasses.replace(
                options, concurrency=users, rates=(load.value,) if load.kind == "rate" else ()
            )
        try:
            report = self._run(options, None)
        except TonleError as error:
            raise self._not_measured(settings, error.message) from None
        if report.interrupted:
            raise KeyboardInterrupt
        level = report.levels[0]
        if not level.succeeded:
            example = level.failures[0].example if level.failures else "none was sent"
            raise self._not_measured(settings, f"no request was answered: {example}")
        tag = Tag(server=settings, stage=stage, round=round, startup_s=startup_s)
        return self._folder.add(tag, report)

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _ready(self, settings: Settings) -> tuple[ServerProcess, float]:
        """A server with these settings, and how long it took to start. A file's prompts are new only to a new server."""
        running = self._server
        same = key_of(settings) == key_of(self._settings)
        if running is not None and running.is_running and same and not self._options.repeats_prompts:
            return running, 0.0
        self.close()
        began_s = time.monotonic()
        state = self._folder.state
        try:
            self._server = self._launcher.start(settings, self._folder.log(key_of(settings) or "default"))
            with contextlib.ExitStack() as stack:
                stack.callback(self.close)
                self._server.wait_ready(
                    None if state.startup_s is None else max(_LEAST_START_S, _PATIENCE * state.startup_s)
                )
                stack.pop_all()
        except ConfigError as error:
            raise self._not_measured(settings, error.message) from None
        self._settings = dict(settings)
        startup_s = time.monotonic() - began_s
        state.startup_s = max(state.startup_s or 0.0, startup_s)
        return self._server, startup_s

    def _most_run_s(self, requests: int) -> float | None:
        """After which a measurement of the search sends no more; None: the default was not measured yet."""
        defaults = self._folder.of({}, "search", "pilot")
        if not defaults:
            return None
        level = defaults[0].level
        return max(_LEAST_RUN_S, _PATIENCE * level.duration_s * requests / level.requests)

    def _not_measured(self, settings: Settings, reason: str) -> NotMeasured:
        self.close()
        self._folder.state.failed[key_of(settings)] = reason
        self._folder.save()
        self._say(f"{describe(settings)} could not be measured: {reason}")
        return NotMeasured(settings, reason)
