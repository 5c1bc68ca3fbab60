"""The comparison for human eyes: servers side by side, then ours against the best of each column.

Does: print, as tables that can be pasted into Markdown. Does not: compute (`scores.py` does).
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.scores import COLUMNS, Column, Judgement, Run, Score, Scores, compare_prompts

STYLES = {"PASS": "green", "MISS": "red"}
TITLES = {column.name: f"{column.title}, {column.unit}" for column in COLUMNS}


def print_scores(runs: Sequence[Run], scores: Scores, console: Console) -> None:
    """One line per server: medians, and how far the repeats are apart."""
    table = Table(box=box.MARKDOWN)
    table.add_column("server", no_wrap=True)
    columns = [column for column in COLUMNS if any(column.name in row for row in scores.values())]
    for column in columns:
        table.add_column(TITLES[column.name], justify="right")
    for server, row in scores.items():
        table.add_row(server, *(_cell(column, row.get(column.name)) for column in columns))
    print_wide(table, console)
    doubts = [
        f"{run.server}, repeat {run.repeat + 1}, level {name}: {doubt}"
        for run in runs
        for name, level in run.levels.items()
        for doubt in level.doubts
    ]
    for text in doubts + compare_prompts(runs):
        console.print(f"note: {text}", style="yellow", highlight=False, markup=False, soft_wrap=True)


def print_verdicts(verdicts: Sequence[Judgement], console: Console) -> None:
    """For each of ours, one line per column: ours, the best peer's, the ratio and whether the target holds."""
    for server in dict.fromkeys(line.server for line in verdicts):
        _print_verdicts_of(server, [line for line in verdicts if line.server == server], console)


def _print_verdicts_of(server: str, verdicts: Sequence[Judgement], console: Console) -> None:
    table = Table(box=box.MARKDOWN)
    for title in ("", server, "best peer", "ratio", "target", ""):
        table.add_column(title)
    for line in verdicts:
        if line.ours is None and line.best is None:
            continue  # its level was left out
        best = "–" if line.best is None else f"{_number(line.best)} ({line.best_peer})"
        ours = "–" if line.ours is None else _number(line.ours)
        ratio = "–" if line.ratio is None else f"{line.ratio:.2f}×"
        verdict = f"[{STYLES.get(line.verdict, 'yellow')}]{line.verdict}[/]"
        table.add_row(TITLES[line.column], ours, best, ratio, line.target, verdict)
    print_wide(table, console)


def _cell(column: Column, score: Score | None) -> str:
    if score is None:
        return "–"
    return _number(score.median) + (f" ±{score.spread:.0%}" if score.count > 1 else "")


def _number(value: float) -> str:
    """Three digits that mean something."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """The first column to the left, numbers to the right."""
    table = Table(box=box.MARKDOWN)
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def print_wide(table: Table, console: Console) -> None:
    """Never folded: a table that is wider than the terminal scrolls, and stays pasteable."""
    console.print()
    width = max(console.width, Console(width=10_000).measure(table).maximum)
    Console(width=width, highlight=False).print(table)
