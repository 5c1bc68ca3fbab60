"""`tonle bench report` and `tonle bench compare`: what saved runs say, for eyes, spreadsheets and CI. Never loads torch.

Exit status: 0 fine · 1 `compare` found a regression · 2 a file cannot be read, or the runs cannot be compared.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from tonle.bench.export import levels_csv, markdown, requests_csv
from tonle.bench.numbers import parse_share
from tonle.bench.report import Run, check_writable, load_report, write_whole
from tonle.cli.screen import show_error
from tonle.errors import ConfigError, TonleError

REGRESSION = 1
WRONG_INPUT = 2
STDOUT = Path("-")
DEFAULT_PAGE = Path("report.html")

_output = partial(typer.Option, rich_help_panel="Output")
_FORCE = "Compare runs of different workloads, and runs saved without rows."
_CONFIDENCE = "Confidence of each interval. Of dozens of numbers at 95%, one is often outside by chance."


def register(app: typer.Typer) -> None:
    """Add the commands of this file to `app`."""
    app.command("report")(report)
    app.command("compare")(compare_runs)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN.json...", help="Reports saved by tonle bench --json.")],
    output: Annotated[
        Path | None,
        _output(
            "--output",
            "-o",
            metavar="FILE",
            help="The HTML page. Default: report.html, unless only others are asked for.",
        ),
    ] = None,
    title: Annotated[str | None, _output(metavar="TEXT", help="The page's title.")] = None,
    markdown_file: Annotated[
        Path | None, _output("--markdown", metavar="FILE|-", help="Tables in Markdown; - is stdout.")
    ] = None,
    csv_file: Annotated[Path | None, _output("--csv", metavar="FILE|-", help="CSV, one row per level.")] = None,
    csv_requests: Annotated[
        Path | None, _output("--csv-requests", metavar="FILE|-", help="CSV, one row per request.")
    ] = None,
) -> None:
    """Make one self-contained HTML page of one or several saved runs, or Markdown and CSV of them.

    [dim]Example:[/dim]  tonle bench report before.json after.json -o report.html

    Exit status: 0 fine, 2 a file cannot be read or written.
    """
    try:
        if output is None and not (markdown_file or csv_file or csv_requests):
            output = DEFAULT_PAGE
        for path in (output, markdown_file, csv_file, csv_requests):
            _check_place(path)
        loaded = load_runs(runs)
        if csv_requests is not None and not any(level.rows for run in loaded for level in run.report.levels):
            raise ConfigError(
                "--csv-requests: these runs were saved without rows of single requests", param="csv_requests"
            )
        if output is not None:
            from tonle.bench.html.page import render_page  # loads numpy

            _write(output, render_page(loaded, title))
        for path, make in ((markdown_file, markdown), (csv_file, levels_csv), (csv_requests, requests_csv)):
            if path is not None:
                _write(path, make(loaded))
    except TonleError as error:
        show_error(error)
        raise typer.Exit(WRONG_INPUT) from None


def compare_runs(
    a: Annotated[str, typer.Argument(metavar="A.json[,A2.json...]", help="Runs before, saved by tonle bench --json.")],
    b: Annotated[str, typer.Argument(metavar="B.json[,B2.json...]", help="Runs after.")],
    tolerance: Annotated[str, typer.Option(metavar="N%", help="A smaller change is no regression.")] = "5%",
    confidence: Annotated[str, typer.Option(metavar="N%", help=_CONFIDENCE)] = "99%",
    seed: Annotated[int, typer.Option(metavar="N", help="Of the resampling.")] = 0,
    force: Annotated[bool, typer.Option("--force", metavar="", help=_FORCE)] = False,
    markdown_file: Annotated[
        Path | None, _output("--markdown", metavar="FILE|-", help="Tables in Markdown; - is stdout.")
    ] = None,
    csv_file: Annotated[Path | None, _output("--csv", metavar="FILE|-", help="CSV, one row per number.")] = None,
    json_file: Annotated[Path | None, _output("--json", metavar="FILE|-", help="The comparison as JSON.")] = None,
    quiet: Annotated[bool, _output("--quiet", "-q", metavar="", help="Print no tables.")] = False,
) -> None:
    """Compare two runs, or several of each, level by level, with confidence intervals.

    [dim]Example:[/dim]  tonle bench compare before.json after.json --tolerance 5%

    Exit status: 0 no regression, 1 a change for the worse beyond the tolerance that the interval confirms, 2 wrong input.
    """
    from tonle.bench.compare import CompareOptions, compare  # loads numpy
    from tonle.bench.compare_tables import comparison_csv, comparison_markdown, print_comparison

    try:
        options = CompareOptions(
            tolerance=parse_share(tolerance, "tolerance"),
            confidence=_confidence(confidence),
            seed=_seed(seed),
            force=force,
        )
        for path in (markdown_file, csv_file, json_file):
            _check_place(path)
        comparison = compare(load_runs(_paths(a)), load_runs(_paths(b)), options)
        for path, make in ((markdown_file, comparison_markdown), (csv_file, comparison_csv), (json_file, _json)):
            if path is not None:
                _write(path, make(comparison))
    except TonleError as error:
        show_error(error)
        raise typer.Exit(WRONG_INPUT) from None
    if not quiet and STDOUT not in (markdown_file, csv_file, json_file):
        print_comparison(comparison, Console())
    if comparison.changes("regression"):
        raise typer.Exit(REGRESSION)


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """Reports, each called by its file's name; by its folder's too where two files have the same."""
    names = [path.stem for path in paths]
    if len(set(names)) < len(names):
        names = [str(path.with_suffix("")) for path in paths]
    return [Run(name, load_report(path)) for name, path in zip(names, paths, strict=True)]


def _paths(text: str) -> list[Path]:
    """Files of one side, separated by commas."""
    paths = [Path(part) for part in text.split(",") if part]
    if not paths:
        raise ConfigError(f"name at least one file for each side, such as before.json, not {text!r}", param="runs")
    return paths


def _confidence(text: str) -> float:
    value = parse_share(text, "confidence")
    if not 0.5 <= value <= 0.999:
        raise ConfigError(f"confidence is between 50% and 99.9%, not {text!r}", param="confidence")
    return value


def _seed(seed: int) -> int:
    if seed < 0:
        raise ConfigError(f"seed must be at least 0, not {seed}", param="seed")
    return seed


def _json(comparison: msgspec.Struct) -> str:
    return msgspec.json.format(msgspec.json.encode(comparison), indent=2).decode() + "\n"


def _check_place(path: Path | None) -> None:
    if path is not None and path != STDOUT:
        check_writable(path)


def _write(path: Path, text: str) -> None:
    if path == STDOUT:
        sys.stdout.write(text)
        return
    write_whole(path, text.encode())
    Console(stderr=True).print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
