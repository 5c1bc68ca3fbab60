"""Reports and comparisons show the numbers of the kind, and those alone."""

from __future__ import annotations

import csv
import io
import random
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.unit.bench.made_reports import made_level, made_report
from tonle.bench.compare import CompareOptions, compare
from tonle.bench.compare_tables import comparison_markdown
from tonle.bench.export import levels_csv, markdown, requests_csv
from tonle.bench.html.page import render_page
from tonle.bench.html.series import timeline
from tonle.bench.kinds.metrics import METRICS, RequestKind
from tonle.bench.measure import Circumstances, LevelReport, Sample, report_level
from tonle.bench.report import BenchReport, Run, load_report, save_report
from tonle.bench.tables import print_report
from tonle.cli.bench import bench
from tonle.errors import ConfigError

HEADS: dict[RequestKind, list[str]] = {
    "embeddings": ["req/s", "inputs/s", "tok/s", "E2EL p50", "p95", "p99"],
    "rerank": ["req/s", "documents/s", "tok/s", "E2EL p50", "p95", "p99"],
    "asr": ["req/s", "audio s/s", "E2EL p50", "p95", "p99", "RTFx p50", "min"],
    "tts": ["req/s", "audio s/s", "first audio p50", "p95", "p99", "E2EL p50", "p95", "p99", "RTFx p50", "min"],
    "images": ["req/s", "images/s", "E2EL p50", "p95", "p99", "s per image p50", "p95", "p99"],
}


def kind_level(
    kind: RequestKind, users: int, *, slowness: float = 1.0, seed: int = 0, requests: int = 60
) -> LevelReport:
    """Of a closed loop of one user after the other: contents by the seed, times by the slowness."""
    rng, now_s, samples = random.Random(f"{seed}/{users}"), 50.0, []
    for index in range(requests):
        took_s = slowness * rng.uniform(0.9, 1.1) / users
        counts = kind in ("embeddings", "rerank")
        samples.append(
            Sample(
                index=index, start_s=now_s, end_s=now_s + took_s, last_s=now_s + took_s,
                arrivals_s=[now_s + took_s / 4] if kind == "tts" else [],
                items=rng.randint(2, 6) if METRICS[kind].items else None,
                prompt_tokens=rng.randint(20, 90) if counts else None,
                audio_s=rng.uniform(3, 9) if kind in ("asr", "tts") else None,
            )
        )  # fmt: skip
        now_s += took_s
    return report_level(samples, Circumstances(label=f"concurrency {users}", concurrency=users), keep_rows=True)


def kind_report(kind: RequestKind, **changes: float) -> BenchReport:
    levels = [kind_level(kind, users, **changes) for users in (1, 2)]  # type: ignore[arg-type]
    return made_report(levels, request_kind=kind, settings={"kind": kind, "seed": 0})


@pytest.mark.parametrize("kind", HEADS)
def test_every_report_has_the_columns_of_its_kind(kind: RequestKind, tmp_path: Path) -> None:
    save_report(kind_report(kind), tmp_path / "run.json")
    run = Run("run", load_report(tmp_path / "run.json"))
    console = Console(file=io.StringIO(), width=200)
    print_report(run.report, console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    page = render_page([run])
    for quantity in METRICS[kind].quantities:
        assert quantity.name in printed and quantity.meaning in page
    for rate in METRICS[kind].rates:
        assert f" {rate.name}" in printed and f">{rate.head}<" in page
    for text in (printed, page):
        assert "Time per output token" not in text and "TPOT" not in text
    heads = next(line for line in markdown([run]).splitlines() if line.startswith("| load"))
    assert heads.strip("| ").split(" | ")[3:] == HEADS[kind]


@pytest.mark.parametrize("kind", HEADS)
def test_csv_is_exact(kind: RequestKind) -> None:
    report = kind_report(kind)
    found = list(csv.DictReader(io.StringIO(levels_csv([Run("run", report)]))))
    assert [row["label"] for row in found] == ["concurrency 1", "concurrency 2"]
    for row, level in zip(found, report.levels, strict=True):
        for rate in METRICS[kind].rates:
            assert float(row[rate.field]) == rate.of(level)
        for quantity in METRICS[kind].quantities:
            spread = quantity.of(level)
            assert spread is not None and float(row[f"{quantity.field}_p50"]) == spread.p50
        assert "tpot_ms_p50" not in row and "output_tokens" not in row
    rows = list(csv.DictReader(io.StringIO(requests_csv([Run("run", report)]))))
    first = (report.levels[0].rows or [])[0]
    assert len(rows) == 120
    for name in (*(rate.amount for rate in METRICS[kind].rates), *(each.field for each in METRICS[kind].quantities)):
        assert float(rows[0][name]) == getattr(first, name)


def test_chats_have_no_columns_of_other_kinds() -> None:
    run = Run("run", made_report([made_level(2)]))
    for text in (levels_csv([run]), requests_csv([run])):
        assert "items" not in text and "audio" not in text and "rtfx" not in text


@pytest.mark.parametrize("kind", HEADS)
def test_a_slower_server_is_a_regression_in_every_number_of_its_kind(kind: RequestKind) -> None:
    a, b = Run("a", kind_report(kind)), Run("b", kind_report(kind, slowness=2.0))
    found = compare([a], [b], CompareOptions(resamples=400))
    for level in found.levels:
        changes = {change.metric: change for change in level.changes}
        for rate in METRICS[kind].rates:
            assert changes[rate.name].verdict == "regression" and changes[rate.name].change == pytest.approx(-0.5)
        for quantity in METRICS[kind].quantities:
            tail = "p5" if quantity.more_is_better else "p95"
            for column in ("p50", tail):
                assert changes[f"{quantity.name} {column}"].verdict == "regression"
        assert "TPOT p50" not in changes and "output tok/s" not in changes
    back = compare([b], [a], CompareOptions(resamples=400))
    assert not back.changes("regression") and back.changes("improvement")
    assert f"{METRICS[kind].quantities[-1].name} p50" in comparison_markdown(found)


def test_runs_of_different_kinds_are_refused_even_if_forced(tmp_path: Path) -> None:
    a, b = Run("a", kind_report("asr")), Run("b", kind_report("tts"))
    for force in (False, True):
        with pytest.raises(ConfigError, match="asr in a and tts in b"):
            compare([a], [b], CompareOptions(force=force))
    for make in (levels_csv, requests_csv, render_page):
        with pytest.raises(ConfigError, match="different kinds"):
            make([a, b])
    for run in (a, b):
        save_report(run.report, tmp_path / f"{run.name}.json")
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    for verb in (["compare", *files], ["report", *files, "-o", str(tmp_path / "page.html")]):
        result = CliRunner().invoke(bench, verb)
        assert result.exit_code == 2 and "different kinds" in result.stderr


def test_other_contents_are_another_workload() -> None:
    report = kind_report("asr")
    other = made_report([kind_level("asr", users, seed=1) for users in (1, 2)], request_kind="asr")
    compare([Run("a", report)], [Run("b", other)])  # other sounds, about as long
    rows = [[Sample(index=row.index, start_s=row.start_s, end_s=row.start_s + 1, last_s=row.start_s + 1,
                    audio_s=2 * (row.audio_s or 0)) for row in level.rows or []] for level in report.levels]  # fmt: skip
    longer = [
        report_level(samples, Circumstances(label=level.label, concurrency=level.concurrency), keep_rows=True)
        for samples, level in zip(rows, report.levels, strict=True)
    ]
    with pytest.raises(ConfigError, match=r"sounds have .* seconds on average"):
        compare([Run("a", report)], [Run("b", made_report(longer, request_kind="asr"))])


def test_a_timeline_holds_everything_that_was_answered() -> None:
    for kind in HEADS:
        level, rate = kind_level(kind, 2), METRICS[kind].throughput
        found = timeline(level, rate)
        assert found is not None
        width_s = found["duration"] / len(found["steps"]["tokens"])
        assert sum(found["steps"]["tokens"]) * width_s == pytest.approx(getattr(level, rate.total), rel=0.01)
