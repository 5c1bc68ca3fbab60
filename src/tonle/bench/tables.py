"""A report for human eyes: one block per level with its numbers and histograms, then the levels side by side."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from tonle.bench.level_lines import level_lines, saturation_line, slo_lines
from tonle.bench.measure import FailureGroup, LevelReport, Spread
from tonle.bench.numbers import ms_text
from tonle.bench.plots import can_show_blocks, histogram_line, scatter
from tonle.bench.report import BenchReport

MAX_FAILURE_GROUPS = 8
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "min", "max")
HISTOGRAM_WIDTH = 40


def print_report(report: BenchReport, console: Console) -> None:
    """Print everything but the single requests."""
    never_fail(console)
    simulated = "  simulated" if report.kind == "simulated" else ""
    print_line(console, f"{report.url}  model {report.model}  prompts {report.prompt_kind}{simulated}")
    for level in report.levels:
        _print_level(level, console)
    if len(report.levels) > 1:
        console.print()
        console.print(_comparison(report.levels))
        _print_tradeoff(report.levels, console)
    if report.saturation is not None:
        print_line(console, saturation_line(report.saturation), style="bold")
    for note in report.notes:
        print_line(console, f"note: {note}", style="yellow")
    if report.interrupted:
        print_line(console, "interrupted: requests still under way are not counted", style="yellow")


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """A line as it is: no markup, no breaks."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def never_fail(console: Console) -> None:
    """A dash that the output's encoding lacks becomes a question mark, not an error after an hour of measuring."""
    file = console.file
    if isinstance(file, io.TextIOWrapper) and "utf" not in console.encoding.lower():
        file.reconfigure(errors="replace")


def _print_level(level: LevelReport, console: Console) -> None:
    console.print()
    print_line(console, level.label, style="bold")
    for line in (*_level_lines(level), *level_lines(level)):
        print_line(console, f"  {line}")
    if level.succeeded:
        console.print(_latencies(level))
        for line in _histograms(level, blocks=can_show_blocks(console)):
            print_line(console, f"  {line}", style="cyan")
    for line in slo_lines(level):
        print_line(console, f"  {line}", style="red" if line.startswith("✗") else "green")
    for text in failure_lines(level.failures):
        print_line(console, f"  {text}", style="red")


def _histograms(level: LevelReport, *, blocks: bool) -> list[str]:
    """Of TTFT and ITL, from the rows."""
    rows = [row for row in level.rows or [] if row.failure is None]
    ttft = [row.ttft_ms for row in rows if row.ttft_ms is not None]
    gaps = [gap for row in rows for gap in row.itl_ms]
    named = (("TTFT", ttft), ("ITL", gaps))
    return [histogram_line(name, values, HISTOGRAM_WIDTH, blocks=blocks) for name, values in named if len(values) > 1]


def _print_tradeoff(levels: list[LevelReport], console: Console) -> None:
    points = [
        (level.output_tokens_per_s, level.ttft_ms.p95, f"{level.concurrency or level.rate or 0:g}")
        for level in levels
        if level.ttft_ms is not None
    ]
    if len(points) < 2:
        return
    console.print()
    plot = scatter(points, x_name="output tok/s", y_name="TTFT p95, ms", blocks=can_show_blocks(console))
    for line in plot:
        print_line(console, f"  {line}")


def failure_lines(failures: list[FailureGroup]) -> list[str]:
    """The most frequent reasons, each with how often, and how many there were for others."""
    lines = [f"failed {group.count}×: {group.example}" for group in failures[:MAX_FAILURE_GROUPS]]
    if rest := sum(group.count for group in failures[MAX_FAILURE_GROUPS:]):
        lines.append(f"failed {rest}×: for other reasons")
    return lines


def _level_lines(level: LevelReport) -> list[str]:
    lines = [
        f"{level.succeeded} of {level.requests} requests answered in {level.duration_s:.2f} s: "
        f"{level.requests_per_s:.2f} req/s",
        f"{level.output_tokens_per_s:.1f} output tok/s, {level.total_tokens_per_s:.1f} total tok/s",
    ]
    if level.succeeded:
        lines.append(_tokens_line(level))
    return lines


def _tokens_line(level: LevelReport) -> str:
    """Tokens per answered request: what was really sent and received, not what was asked for."""
    prompt = "unknown" if level.prompt_tokens is None else f"{level.prompt_tokens / level.succeeded:.1f}"
    cached = "" if level.cached_tokens is None else f" ({level.cached_tokens / level.succeeded:.1f} cached)"
    return f"tokens per request: prompt {prompt}{cached}, output {level.output_tokens / level.succeeded:.1f}"


def _latencies(level: LevelReport) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 2))
    table.add_column("ms", style="cyan")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for name, spread in _named_spreads(level):
        table.add_row(name, *(_number(spread, column) for column in COLUMNS))
    return table


def _named_spreads(level: LevelReport) -> tuple[tuple[str, Spread | None], ...]:
    return ("TTFT", level.ttft_ms), ("TPOT", level.tpot_ms), ("ITL", level.itl_ms), ("E2EL", level.e2el_ms)


def _comparison(levels: list[LevelReport]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 1))
    table.add_column("users" if levels[0].rate is None else "rate", style="bold", justify="right")
    for name in ("failed", "req/s", "out tok/s", "TTFT p50", "p99", "TPOT p50", "E2EL p50", "p99"):
        table.add_column(name, justify="right")
    for level in levels:
        table.add_row(
            f"{level.concurrency or level.rate or 0:g}",
            str(level.failed),
            f"{level.requests_per_s:.2f}",
            f"{level.output_tokens_per_s:.1f}",
            _number(level.ttft_ms, "p50"),
            _number(level.ttft_ms, "p99"),
            _number(level.tpot_ms, "p50"),
            _number(level.e2el_ms, "p50"),
            _number(level.e2el_ms, "p99"),
        )
    return table


def _number(spread: Spread | None, column: str) -> str:
    """Milliseconds with about three significant digits."""
    return ms_text(None if spread is None else getattr(spread, column))
