"""A report for human eyes: one block per level with its numbers and histograms, then the levels side by side."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from tonle.bench.kinds.metrics import METRICS, KindMetrics
from tonle.bench.level_lines import level_lines, saturation_line, slo_lines
from tonle.bench.measure import FailureGroup, LevelReport, Spread
from tonle.bench.numbers import NOTHING, ms_text
from tonle.bench.plots import can_show_blocks, histogram_line, scatter
from tonle.bench.report import BenchReport

MAX_FAILURE_GROUPS = 8
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "min", "max")
HISTOGRAM_WIDTH = 40


def print_report(report: BenchReport, console: Console) -> None:
    """Print everything but the single requests."""
    never_fail(console)
    simulated = "  simulated" if report.kind == "simulated" else ""
    kind = "" if report.request_kind == "chat" else f"  kind {report.request_kind}"
    print_line(console, f"{report.url}  model {report.model}{kind}  prompts {report.prompt_kind}{simulated}")
    for level in report.levels:
        _print_level(level, report.metrics, console)
    if len(report.levels) > 1:
        console.print()
        console.print(_comparison(report.levels, report.metrics))
        _print_tradeoff(report.levels, report.metrics, console)
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


def _print_level(level: LevelReport, metrics: KindMetrics, console: Console) -> None:
    console.print()
    print_line(console, level.label, style="bold")
    for line in (*_level_lines(level, metrics), *level_lines(level)):
        print_line(console, f"  {line}")
    if level.succeeded:
        console.print(_latencies(level, metrics))
        for line in _histograms(level, metrics, blocks=can_show_blocks(console)):
            print_line(console, f"  {line}", style="cyan")
    for line in slo_lines(level):
        print_line(console, f"  {line}", style="red" if line.startswith("✗") else "green")
    for text in failure_lines(level.failures):
        print_line(console, f"  {text}", style="red")


def _histograms(level: LevelReport, metrics: KindMetrics, *, blocks: bool) -> list[str]:
    """From the rows; of chats, of TTFT and ITL."""
    lines, width = [], max(len(quantity.name) for quantity in metrics.quantities)
    for quantity in metrics.quantities:
        values = [value for row in level.rows or [] for value in quantity.values(row)]
        if quantity.histogram and len(values) > 1:
            lines.append(histogram_line(f"{quantity.name:<{width}}", values, HISTOGRAM_WIDTH, blocks=blocks))
    return lines


def _print_tradeoff(levels: list[LevelReport], metrics: KindMetrics, console: Console) -> None:
    latency = metrics.quantities[0]
    points = [
        (metrics.speed(level), spread.p95, f"{level.concurrency or level.rate or 0:g}")
        for level in levels
        if (spread := latency.of(level)) is not None
    ]
    if len(points) < 2:
        return
    console.print()
    plot = scatter(
        points,
        x_name=metrics.speed_unit(levels[0]),
        y_name=f"{latency.name} p95, ms",
        blocks=can_show_blocks(console),
    )
    for line in plot:
        print_line(console, f"  {line}")


def failure_lines(failures: list[FailureGroup]) -> list[str]:
    """The most frequent reasons, each with how often, and how many there were for others."""
    lines = [f"failed {group.count}×: {group.example}" for group in failures[:MAX_FAILURE_GROUPS]]
    if rest := sum(group.count for group in failures[MAX_FAILURE_GROUPS:]):
        lines.append(f"failed {rest}×: for other reasons")
    return lines


def _level_lines(level: LevelReport, metrics: KindMetrics) -> list[str]:
    lines = [
        f"{level.succeeded} of {level.requests} requests answered in {level.duration_s:.2f} s: "
        f"{level.requests_per_s:.2f} req/s"
    ]
    rates = [f"{found:.1f} {rate.name}" for rate in metrics.rates if (found := rate.of(level)) is not None]
    if metrics is METRICS["chat"]:
        rates.append(f"{level.total_tokens_per_s:.1f} total tok/s")
    lines += [", ".join(rates)] if rates else []
    if level.succeeded:
        line = _tokens_line(level) if metrics is METRICS["chat"] else _contents_line(level, metrics)
        lines += [line] if line else []
    return lines


def _contents_line(level: LevelReport, metrics: KindMetrics) -> str:
    """What an answered request held on average."""
    parts = []
    if metrics.items is not None and level.items is not None:
        parts.append(f"{level.items / level.succeeded:.1f} {metrics.items}")
    if level.prompt_tokens is not None:
        parts.append(f"{level.prompt_tokens / level.succeeded:.1f} tokens")
    if level.audio_s is not None:
        parts.append(f"{level.audio_s / level.succeeded:.1f} s of audio")
    return f"per request: {', '.join(parts)}" if parts else ""


def _tokens_line(level: LevelReport) -> str:
    """Tokens per answered request: what was really sent and received, not what was asked for."""
    prompt = "unknown" if level.prompt_tokens is None else f"{level.prompt_tokens / level.succeeded:.1f}"
    cached = "" if level.cached_tokens is None else f" ({level.cached_tokens / level.succeeded:.1f} cached)"
    return f"tokens per request: prompt {prompt}{cached}, output {level.output_tokens / level.succeeded:.1f}"


def _latencies(level: LevelReport, metrics: KindMetrics) -> Table:
    all_ms = metrics.times == metrics.quantities
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 2))
    table.add_column("ms" if all_ms else "", style="cyan")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for quantity in metrics.quantities:
        name = quantity.name if all_ms else quantity.name_and_unit
        table.add_row(name, *(_number(quantity.of(level), column) for column in COLUMNS))
    return table


def _comparison(levels: list[LevelReport], metrics: KindMetrics) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 1))
    table.add_column("users" if levels[0].rate is None else "rate", style="bold", justify="right")
    for name in ("failed", "req/s", *(rate.head for rate in metrics.rates)):
        table.add_column(name, justify="right")
    for quantity in metrics.quantities:
        for place, column in enumerate(quantity.few):
            table.add_column(column if place else f"{quantity.name} {column}", justify="right")
    for level in levels:
        table.add_row(
            f"{level.concurrency or level.rate or 0:g}",
            str(level.failed),
            f"{level.requests_per_s:.2f}",
            *(NOTHING if (found := rate.of(level)) is None else f"{found:.1f}" for rate in metrics.rates),
            *(_number(quantity.of(level), column) for quantity in metrics.quantities for column in quantity.few),
        )
    return table


def _number(spread: Spread | None, column: str) -> str:
    """With about three significant digits."""
    return ms_text(None if spread is None else getattr(spread, column))
