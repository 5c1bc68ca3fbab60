"""`tonle bench report` and `tonle bench compare`, exit statuses and files; export; plots; the live dashboard's counts."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.unit.bench.made_reports import SLO, made_level, made_report, made_samples
from tonle.bench import BenchReport, save_report
from tonle.bench.answer_stream import StreamedAnswer
from tonle.bench.load import Load
from tonle.bench.plots import histogram, scatter, sparkline
from tonle.bench.progress import LiveWatch
from tonle.bench.tables import print_report
from tonle.bench.tally import LatencyCounts
from tonle.bench.underway import Underway, UnderwayCounts
from tonle.cli.app import app


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_report(made_report([made_level(1, slo=SLO), made_level(4, slo=SLO)]), Path("a.json"))
    save_report(made_report([made_level(1, slo=SLO), made_level(4, slo=SLO, gap_s=0.03)]), Path("b.json"))
    save_report(made_report([made_level(4, rows=False)]), Path("bare.json"))
    return tmp_path


def bench(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["bench", *words], env={"COLUMNS": "200"})
    return done.exit_code, done.stdout, done.stderr


def test_a_page_is_written(folder: Path) -> None:
    assert bench("report", "a.json", "b.json")[0] == 0
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    status, out, _ = bench("report", "a.json", "-o", "x.html", "--title", "Two & more")
    assert (status, out) == (0, "")
    assert "<h1>Two &amp; more</h1>" in (folder / "x.html").read_text()


def test_markdown_and_csv(folder: Path) -> None:
    status, out, _ = bench("report", "a.json", "--markdown", "-")
    assert status == 0 and not (folder / "report.html").exists(), "only what was asked for"
    assert "| concurrency 4 | 40 | 0 |" in out and "held" in out
    status, out, _ = bench("report", "a.json", "b.json", "--csv", "-")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [(row["run"], row["label"]) for row in rows] == [
        (run, f"concurrency {users}") for run in "ab" for users in (1, 4)
    ]
    level = made_level(4, slo=SLO)
    assert level.ttft_ms is not None
    assert float(rows[1]["ttft_ms_p95"]) == pytest.approx(level.ttft_ms.p95)
    assert bench("report", "a.json", "--csv-requests", "rows.csv")[0] == 0
    requests = list(csv.DictReader((folder / "rows.csv").open()))
    assert len(requests) == 80 and {row["level"] for row in requests} == {"concurrency 1", "concurrency 4"}
    assert float(requests[0]["itl_ms_max"]) >= float(requests[0]["itl_ms_p50"]) > 0


def test_texts_are_no_markup_and_no_formulas(folder: Path) -> None:
    report = made_report([made_level(failed=1)], model="a|b <img> *c*")
    rows = [msgspec.structs.replace(row, failure="=cmd()") for row in report.levels[0].rows or []]
    report = made_report([msgspec.structs.replace(report.levels[0], rows=rows)], model="a|b <img> *c*")
    save_report(report, folder / "x.json")
    assert r"a\|b \<img\> \*c\*" in bench("report", "x.json", "--markdown", "-")[1]
    assert "'=cmd()" in bench("report", "x.json", "--csv-requests", "-")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report", "missing.json"], "cannot read missing.json"),
        (["report", "a.json", "-o", "no/where.html"], "is not a writable folder"),
        (["report", "bare.json", "--csv-requests", "-"], "saved without rows"),
        (["compare", "a.json", "missing.json"], "cannot read missing.json"),
        (["compare", "a.json", "bare.json"], "no rows of single requests"),
        (["compare", "a.json", "b.json", "--tolerance", "much"], "such as 5% or 0.05, not 'much'"),
        (["compare", "a.json", "b.json", "--confidence", "20%"], "between 50% and 99.9%"),
        (["compare", "a.json", ","], "name at least one file"),
    ],
)
def test_wrong_input(folder: Path, words: list[str], message: str) -> None:
    status, _, err = bench(*words)
    assert status == 2
    assert message in err


def test_compare_exits_with_1_on_a_regression(folder: Path) -> None:
    status, out, _ = bench("compare", "a.json", "b.json")
    assert status == 1 and "✗ regression" in out
    assert bench("compare", "a.json", "b.json", "--tolerance", "90%")[0] == 0
    assert bench("compare", "a.json", "a.json")[0] == 0
    assert bench("compare", "b.json", "a.json")[0] == 0, "faster is no regression"
    assert bench("compare", "a.json,a.json", "b.json,b.json", "-q")[0] == 1


def test_compare_for_machines(folder: Path) -> None:
    status, out, _ = bench("compare", "a.json", "b.json", "--json", "-", "--markdown", "x.md")
    assert status == 1
    document = json.loads(out)
    assert document["schema"] == "tonle.bench.comparison/1" and document["a"] == ["a"]
    assert "✗ regression" in (folder / "x.md").read_text()


def test_options_stand_after_the_command(folder: Path) -> None:
    status, _, err = bench("--url", "http://x", "report", "a.json")
    assert status == 2 and "put --url after" in err


def printed(report: BenchReport, encoding: str) -> str:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding)
    print_report(report, Console(file=out, width=100))
    out.flush()
    return raw.getvalue().decode(encoding)


def test_plots_in_the_terminal() -> None:
    report = made_report([made_level(1), made_level(4), made_level(8)])
    text = printed(report, "utf-8")
    assert text.count("█") >= 6 and text.count("●") >= 2 and "TTFT p95, ms" in text
    plain = printed(report, "ascii")
    assert "@" in plain and plain.count("*") >= 2, "ASCII stands in for blocks"


def test_histograms_count_every_value() -> None:
    line, low, high, log = histogram([1.0, 1.0, 1.0, 10.0], 4)
    assert (line[0], line[3], low, high, log) == ("█", "▃", 1.0, 10.0, False)
    assert histogram([1.0, 1000.0], 10)[3]
    assert histogram([5.0, 5.0], 8)[0][0] == "█"
    assert sparkline([0.0, 0.001, 1.0]) == " ▁█", "what is there is seen"
    assert sparkline([0, 4, 8], blocks=False) == " =@"
    assert sparkline([0, 0]) == "  "


def test_the_scatter_plot_places_points() -> None:
    lines = scatter([(0.0, 1.0, "one"), (10.0, 2.0, "two")], width=20, height=5, x_name="x", y_name="y")
    assert lines[1].rstrip().endswith("● two") and "● one" in lines[3]
    assert "10.0" in lines[-1]


def test_estimated_percentiles_are_close() -> None:
    rng = np.random.default_rng(1)
    values = rng.lognormal(-4, 0.7, 5000)
    counts = LatencyCounts()
    counts.add(values)
    for percent in (50, 95):
        assert counts.percentile_ms(percent) == pytest.approx(1e3 * np.percentile(values, percent), rel=0.025)
    assert LatencyCounts().percentile_ms(50) is None


def test_what_is_under_way() -> None:
    underway = Underway()
    waiting, running, ended = StreamedAnswer(), StreamedAnswer(), StreamedAnswer()
    for answer in (waiting, running, ended):
        underway.begin(answer)
    running.arrivals_s += [1.0, 2.0]
    ended.arrivals_s += [1.0, 2.0, 3.0]
    underway.end(ended)
    assert underway.counts() == UnderwayCounts(waiting=1, running=1, chunks=5)


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_dashboard(width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    watch = LiveWatch(console)
    watch.follow(lambda: UnderwayCounts(waiting=2, running=6, chunks=900))
    watch.started(Load("concurrency", 8), 40, None)
    for sample in made_samples(failed=3):
        watch.answered(sample)
    watch.finished(made_level(8))
    text = out.getvalue()
    for words in ("concurrency 8", "40/40 done", "6 getting tokens, 2 waiting", "TTFT p50", "3× HTTP 503"):
        assert words in text
    assert max(len(line) for line in text.replace("\r", "\n").split("\n") if "\x1b" not in line) <= width
