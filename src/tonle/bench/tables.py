"""A report for human eyes: one block per level, then the levels side by side."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tonle.bench.level_lines import level_lines, saturation_line, slo_lines
from tonle.bench.measure import FailureGroup, LevelReport, Spread
from tonle.bench.report import BenchReport

MAX_FAILURE_GROUPS = 8
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "min", "max")


def print_report(report: BenchReport, console: Console) -> None:
    """Print everything but the single requests."""
    console.print(f"{report.url}  model {report.model}  prompts {report.prompt_kind}", highlight=False, markup=False)
    for level in report.levels:
        _print_level(level, console)
    if len(report.levels) > 1:
        console.print()
        console.print(_comparison(report.levels))
    if report.saturation is not None:
        console.print(saturation_line(report.saturation), style="bold", highlight=False, markup=False, soft_wrap=True)
    for note in report.notes:
        console.print(f"note: {note}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    if report.interrupted:
        console.print("interrupted: requests still under way are not counted", style="yellow", highlight=False)


def _print_level(level: LevelReport, console: Console) -> None:
    console.print()
    console.print(f"{level.label}", style="bold", highlight=False)
    for line in (*_level_lines(level), *level_lines(level)):
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    if level.succeeded:
        console.print(_latencies(level))
    for line in slo_lines(level):
        console.print(f"  {line}", style="red" if line.startswith("✗") else "green", highlight=False, soft_wrap=True)
    for text in failure_lines(level.failures):
        console.print(f"  {text}", style="red", highlight=False, markup=False, soft_wrap=True)


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
            f"{level.concurrency or level.rate:g}",
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
    if spread is None:
        return "–"
    value: float = getattr(spread, column)
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
