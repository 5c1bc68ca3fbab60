"""A report of scenarios for human eyes: one result block per scenario, then the scenarios side by side."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tonle.bench.measure import Spread
from tonle.bench.scenario_report import ScenarioReport, ScenarioResult, seconds
from tonle.bench.tables import failure_lines

RULE = "=" * 36
NAME_WIDTH = 21  # where the numbers begin
PASS, FAIL = ("✓", "green"), ("✗", "red")


def print_scenarios(report: ScenarioReport, console: Console | None = None) -> None:
    """Print everything but the single requests, to stdout unless another console is given."""
    console = console or Console()
    _line(console, f"{report.target}  model {report.model or 'unknown'}  {report.asked_by}")
    _line(console, _workload(report))
    for result in report.scenarios:
        console.print()
        _print_block(result, report.sla_s, console)
    if len(report.scenarios) > 1:
        console.print()
        console.print(_comparison(report.scenarios))
    if report.notes or report.interrupted:
        console.print()
    for note in report.notes:
        _line(console, f"note: {note}", style="yellow")
    if report.interrupted:
        _line(console, "interrupted: requests still under way are not counted", style="yellow")


def _workload(report: ScenarioReport) -> str:
    settings = report.settings
    return (
        f"{settings['requests']} questions each, {settings['repeat_share']:.0%} repeated, "
        f"up to {settings['output_tokens']} tokens per answer, seed {report.seed}"
    )


def _print_block(result: ScenarioResult, sla_s: float, console: Console) -> None:
    _line(console, f"Benchmark Results: {result.label}", style="bold")
    _line(console, RULE)
    for line in block_lines(result, sla_s):
        console.print(line, highlight=False, soft_wrap=not console.is_terminal)
    for text in failure_lines(result.failures):
        _line(console, text, style="red")
    _line(console, RULE)


def block_lines(result: ScenarioResult, sla_s: float) -> list[Text]:
    """The lines between the rules."""
    latency = result.latency_s
    p95_mark, p95_style = PASS if latency is not None and latency.p95 < sla_s else FAIL
    mark, style = PASS if result.meets_sla else FAIL
    lines = [
        _pair("Total Requests:", str(result.requests)),
        _pair("Successful:", str(result.succeeded)),
        _pair("Failed:", str(result.failed)),
        Text(),
        Text("Latency Statistics:"),
        _pair("  Average:", _number(latency, "mean")),
        _pair("  Median:", _number(latency, "p50")),
        _pair("  P50:", _number(latency, "p50")),
        _pair("  P95:", _number(latency, "p95")).append(f" {p95_mark}", p95_style),
        _pair("  P99:", _number(latency, "p99")),
        _pair("  Min:", _number(latency, "min")),
        _pair("  Max:", _number(latency, "max")),
        Text(),
        _pair(
            "Cache Hit Rate:", _hits(result) + ("" if result.use_cache or result.cache_hits is None else " (not used)")
        ),
        _pair("Throughput:", f"{result.requests_per_s:.2f} req/s"),
        Text(),
        _pair("SLA Status:", "").append(f"{mark} {_verdict(result, sla_s)}", style),
    ]
    if result.interrupted:
        lines.append(Text("interrupted", "yellow"))
    return lines


def _verdict(result: ScenarioResult, sla_s: float) -> str:
    return f"PASS (P95 < {seconds(sla_s)})" if result.meets_sla else f"FAIL ({result.why_not})"


def _comparison(results: list[ScenarioResult]) -> Table:
    """Fits into 80 columns."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("scenario (times in s)", style="bold", no_wrap=True)
    for name in ("failed", "avg", "P50", "P95", "P99", "hits", "req/s", "SLA"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        latency, (_, style) = result.latency_s, PASS if result.meets_sla else FAIL
        table.add_row(
            result.label,
            str(result.failed),
            *(_short(latency, column) for column in ("mean", "p50", "p95", "p99")),
            _hits(result),
            f"{result.requests_per_s:.2f}" if result.requests_per_s < 100 else f"{result.requests_per_s:.0f}",
            Text("PASS" if result.meets_sla else "FAIL", style),
        )
    return table


def _pair(name: str, value: str) -> Text:
    return Text(name.ljust(NAME_WIDTH) + value)


def _number(latency: Spread | None, column: str) -> str:
    return "–" if latency is None else f"{getattr(latency, column):.3f}s"


def _short(latency: Spread | None, column: str) -> str:
    """Seconds in five characters."""
    if latency is None:
        return "–"
    value: float = getattr(latency, column)
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _hits(result: ScenarioResult) -> str:
    return "–" if result.cache_hit_rate is None else f"{result.cache_hit_rate:.1%}"


def _line(console: Console, text: str, *, style: str | None = None) -> None:
    """Wrapped at words on a terminal, one line for a file or a pipe."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=not console.is_terminal)
