"""How a running benchmark looks: a live line on a terminal, plain lines elsewhere. Both are a `Watch` and a `ScenarioWatch`.

Does: count and show. Does not: keep samples. Output goes to the console it is given, usually stderr, so that stdout
has the tables alone.
"""

from __future__ import annotations

from time import monotonic
from typing import Literal, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from tonle.bench.measure import LevelReport, Sample
from tonle.bench.scenario_report import ScenarioResult

Unit = Literal["tok/s", "req/s"]

LINE_EVERY_S = 10.0
REFRESH_PER_S = 2  # drawing takes CPU from the client's own timestamps


class Labelled(Protocol):
    """A level's `Load`, or a `Scenario`."""

    @property
    def label(self) -> str: ...


class _Tally:
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

    def add(self, sample: Sample) -> None:
        self.num_done += 1
        if sample.failure is None:
            self.output_tokens += sample.output_tokens
        else:
            self.num_failed += 1

    @property
    def elapsed_s(self) -> float:
        return monotonic() - self.begin_s

    def __str__(self) -> str:
        of = "" if self.num_requests is None else f"/{self.num_requests}"
        done = self.output_tokens if self.unit == "tok/s" else self.num_done - self.num_failed
        speed = done / max(self.elapsed_s, 1e-9)
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        return f"{self.num_done}{of} requests, {speed:.1f} {self.unit}{failed}"


class LiveWatch:
    """One moving line per level."""

    def __init__(self, console: Console, unit: Unit = "tok/s") -> None:
        self._unit = unit
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[tally]}"),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=REFRESH_PER_S,
            transient=True,
        )
        self._tally: _Tally | None = None
        self._task = TaskID(0)

    def started(self, load: Labelled, num_requests: int | None, duration_s: float | None) -> None:
        self._tally = _Tally(load, num_requests, duration_s, self._unit)
        total = num_requests if num_requests is not None else duration_s
        self._task = self._progress.add_task(load.label, total=total, tally=self._tally)
        self._progress.start()

    def answered(self, sample: Sample) -> None:
        assert self._tally is not None, "a level starts before it is answered"
        self._tally.add(sample)
        done = self._tally.num_done if self._tally.num_requests is not None else self._tally.elapsed_s
        self._progress.update(self._task, completed=done)

    def finished(self, level: LevelReport | ScenarioResult) -> None:
        self._progress.stop()
        self._progress.remove_task(self._task)


class LineWatch:
    """A line when a level starts, every ten seconds, and when it ends."""

    def __init__(self, console: Console, unit: Unit = "tok/s") -> None:
        self._console = console
        self._unit = unit
        self._tally: _Tally | None = None
        self._next_s = 0.0

    def started(self, load: Labelled, num_requests: int | None, duration_s: float | None) -> None:
        self._tally = _Tally(load, num_requests, duration_s, self._unit)
        self._next_s = monotonic() + LINE_EVERY_S
        limits = [f"{num_requests} requests"] if num_requests is not None else []
        limits += [f"{duration_s:g} s"] if duration_s is not None else []
        self._print(f"{load.label}: {', at most '.join(limits)}")

    def answered(self, sample: Sample) -> None:
        assert self._tally is not None, "a level starts before it is answered"
        self._tally.add(sample)
        if monotonic() >= self._next_s:
            self._next_s = monotonic() + LINE_EVERY_S
            self._print(f"{self._tally.load.label}: {self._tally}")

    def finished(self, level: LevelReport | ScenarioResult) -> None:
        ending = "interrupted" if level.interrupted else "done"
        speed = level.output_tokens_per_s if self._unit == "tok/s" else level.requests_per_s
        self._print(
            f"{level.label}: {ending}, {level.succeeded}/{level.requests} answered in {level.duration_s:.1f} s, "
            f"{speed:.1f} {self._unit}"
        )

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
