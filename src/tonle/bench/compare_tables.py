"""A comparison for human eyes: a table per level on a terminal, the same as Markdown, and rows for CSV."""

from __future__ import annotations

import csv
import io

from rich.console import Console
from rich.table import Table

from tonle.bench.compare import Change, Comparison, LevelComparison, Verdict
from tonle.bench.numbers import change_text, ms_text, rate_text, share_text
from tonle.bench.tables import never_fail, print_line

COLUMNS = ("", "A", "B", "change", "interval", "")
MARKS: dict[Verdict, str] = {"regression": "✗ regression", "improvement": "✓ improvement"}
STYLES: dict[Verdict, str] = {"regression": "bold red", "improvement": "green"}
CSV_FIELDS = (
    "level",
    "metric",
    "unit",
    "better",
    "a",
    "b",
    "change",
    "low",
    "high",
    "verdict",
    "requests_a",
    "requests_b",
)


def print_comparison(comparison: Comparison, console: Console) -> None:
    never_fail(console)
    print_line(console, f"A: {', '.join(comparison.a)}")
    print_line(console, f"B: {', '.join(comparison.b)}")
    for level in comparison.levels:
        console.print()
        print_line(console, level_title(level), style="bold")
        console.print(_table(level))
    console.print()
    for note in comparison.notes:
        print_line(console, f"note: {note}", style="yellow")
    print_line(console, f"method: {comparison.method}", style="dim")
    print_line(console, conclusion(comparison), style="bold red" if comparison.changes("regression") else "bold")


def level_title(level: LevelComparison) -> str:
    paired = ", the same prompts in both" if level.paired else ""
    return f"{level.label}: {level.requests_a} requests in A, {level.requests_b} in B{paired}"


def conclusion(comparison: Comparison) -> str:
    """The comparison in one sentence."""
    worse, better = comparison.changes("regression"), comparison.changes("improvement")
    if not worse and not better:
        return f"no change beyond {100 * comparison.tolerance:g} % that the intervals confirm"
    words = [
        f"{len(worse)} regression{'s' * (len(worse) != 1)}",
        f"{len(better)} improvement{'s' * (len(better) != 1)}",
    ]
    return f"{' and '.join(words)} beyond {100 * comparison.tolerance:g} %"


def cells(change: Change) -> tuple[str, str, str, str, str, str]:
    """Of one row of a table."""
    text = {"per_s": rate_text, "share": share_text}.get(change.unit, ms_text)
    points = change.unit == "share"
    ends = (
        "–"
        if change.low is None or change.high is None
        else f"{change_text(change.low, points=points)} … {change_text(change.high, points=points)}"
    )
    name = f"{change.metric}, {change.unit}" if change.unit in ("ms", "GiB") else change.metric
    verdict = MARKS.get(change.verdict, change.verdict)
    return name, text(change.a), text(change.b), change_text(change.change, points=points), ends, verdict


def _table(level: LevelComparison) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 1))
    for place, name in enumerate(COLUMNS):
        table.add_column(
            name, justify="right" if 0 < place < 5 else "left", no_wrap=True, style="cyan" if not place else None
        )
    for change in level.changes:
        table.add_row(*cells(change), style=STYLES.get(change.verdict))
    return table


def comparison_markdown(comparison: Comparison) -> str:
    """For a pull request or the summary of a CI job."""
    lines = [f"**{conclusion(comparison)}**", "", f"A: {_code(comparison.a)} · B: {_code(comparison.b)}"]
    for level in comparison.levels:
        lines += ["", f"### {level_title(level)}", "", "| | A | B | change | interval | |", "|---|--:|--:|--:|--:|---|"]
        for change in level.changes:
            row = cells(change)
            bold = "**" if change.verdict in MARKS else ""
            lines.append(f"| {' | '.join(row[:5])} | {bold}{row[5]}{bold} |")
    lines += ["", *(f"- {note}" for note in comparison.notes), "", f"_{comparison.method}_", ""]
    return "\n".join(lines)


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name.replace('`', '')}`" for name in names)


def comparison_csv(comparison: Comparison) -> str:
    """One row per level and number, unrounded."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_FIELDS)
    for level in comparison.levels:
        for each in level.changes:
            writer.writerow([
                level.label, each.metric, each.unit, each.better, each.a, each.b, each.change, each.low, each.high,
                each.verdict, level.requests_a, level.requests_b,
            ])  # fmt: skip
    return out.getvalue()
