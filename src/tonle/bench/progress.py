"""How a running benchmark looks: a few live lines on a terminal, plain lines elsewhere. Both are a `Watch` and a `ScenarioWatch`.

Does: show a `Tally`. Does not: keep samples. Output goes to the console it is given, usually stderr, so that stdout
has the tables alone. Drawing takes about half a millisecond twice a second, in a thread of its own: chunks that arrive
meanwhile wait that long.
"""

from __future__ import annotations

from time import monotonic

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from tonle.bench.measure import LevelReport, Sample
from tonle.bench.numbers import clock_text, count_text, ms_text, rate_text
from tonle.bench.plots import can_show_blocks, sparkline
from tonle.bench.scenario_report import ScenarioResult
from tonle.bench.tally import Follow, Labelled, LatencyCounts, Tally, Unit

LINE_EVERY_S = 10.0
DRAWS_PER_S = 2
BAR_WIDTH = 24
MAX_KINDS = 3  # of failures that are named
NAME_WIDTH = 8


class LiveWatch:
    """Some lines that change: how far the level is, users, latencies so far, speed, failures."""

    def __init__(self, console: Console, unit: Unit = "tok/s") -> None:
        self._console = console
        self._unit = unit
        self._blocks = can_show_blocks(console)
        self._tally: Tally | None = None
        self._follow: Follow | None = None
        self._live: Live | None = None

    def follow(self, underway: Follow) -> None:
        """`underway` says what is under way whenever it is asked."""
        self._follow = underway

    def started(self, load: Labelled, num_requests: int | None, duration_s: float | None) -> None:
        self._tally = Tally(load, num_requests, duration_s, self._unit)
        if self._follow is not None:
            self._tally.chunks_before = self._follow().chunks
        self._live = Live(
            console=self._console, get_renderable=self._draw, refresh_per_second=DRAWS_PER_S, transient=True
        )
        self._live.start()

    def answered(self, sample: Sample) -> None:
        assert self._tally is not None, "a level starts before it is answered"
        self._tally.add(sample)

    def finished(self, level: LevelReport | ScenarioResult) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self) -> Group:
        tally = self._tally
        if tally is None:
            return Group()
        counts = self._follow() if self._follow is not None else None
        tally.look(counts)
        lines = [self._head(tally)]
        if counts is not None:
            text = f"{count_text(counts.running + counts.waiting)} under way"
            if tally.unit == "tok/s":
                text = (
                    f"{count_text(counts.running)} getting tokens, {count_text(counts.waiting)} waiting for the first"
                )
            lines.append(_line("requests", text))
        lines.append(_line("latency", self._latencies(tally)))
        lines.append(_line(tally.unit, self._speed(tally)))
        if tally.failures:
            lines.append(_line("failed", _failures(tally), style="red"))
        return Group(*lines)

    def _head(self, tally: Tally) -> Text:
        share = tally.share_done
        full, empty = ("━", "╌") if self._blocks else ("#", ".")
        bar = ""
        if share is not None:
            filled = round(share * BAR_WIDTH)
            bar = f"{full * filled}{empty * (BAR_WIDTH - filled)} "
        of = "" if tally.num_requests is None else f"/{count_text(tally.num_requests)}"
        left = "" if tally.left_s is None else f", {clock_text(tally.left_s)} left"
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(f"{tally.load.label}  ", style="bold")
        text.append(bar, style="cyan")
        text.append(f"{count_text(tally.num_done)}{of} done in {clock_text(tally.elapsed_s)}{left}")
        return text

    @staticmethod
    def _latencies(tally: Tally) -> str:
        named: list[tuple[str, LatencyCounts]] = [("TTFT", tally.ttft), ("ITL", tally.itl)]
        if tally.ttft.percentile_ms(50) is None or tally.unit == "req/s":
            named = [("E2EL", tally.e2el)]
        parts = []
        for name, counts in named:
            p50, p95 = counts.percentile_ms(50), counts.percentile_ms(95)
            if p50 is not None:
                parts.append(f"{name} p50 {ms_text(p50)} p95 {ms_text(p95)} ms")
        return "   ".join(parts) or "no answer yet"

    def _speed(self, tally: Tally) -> str:
        now = rate_text(sum(list(tally.speeds)[-4:]) / max(1, min(4, len(tally.speeds))))
        line = sparkline(list(tally.speeds), blocks=self._blocks)
        return f"{now} now  {line}  {rate_text(tally.mean_speed)} on average"


def _line(name: str, text: str, style: str | None = None) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"  {name:<{NAME_WIDTH}} ", style="dim")
    line.append(text, style=style)
    return line


def _failures(tally: Tally) -> str:
    failures = list(tally.failures.items())  # a copy: another thread adds to them
    named = sorted(failures, key=lambda each: -each[1])[:MAX_KINDS]
    rest = tally.num_failed - sum(count for _, count in named)
    parts = [f"{count_text(count)}× {kind}" for kind, count in named]
    return ", ".join([*parts, f"{count_text(rest)}× others"] if rest > 0 else parts)


class LineWatch:
    """A line when a level starts, every ten seconds, and when it ends."""

    def __init__(self, console: Console, unit: Unit = "tok/s") -> None:
        self._console = console
        self._unit = unit
        self._tally: Tally | None = None
        self._next_s = 0.0

    def started(self, load: Labelled, num_requests: int | None, duration_s: float | None) -> None:
        self._tally = Tally(load, num_requests, duration_s, self._unit)
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
