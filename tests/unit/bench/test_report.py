"""Saving, reading back, printing."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from tests.unit.bench.made_reports import made_level, made_report
from tests.unit.bench.scripted import Behaviour, json_reply, serving
from tonle.bench import BenchOptions, BenchReport, Span, load_report, run_bench, save_report
from tonle.bench.measure import Circumstances, Sample, report_level
from tonle.bench.progress import LineWatch, LiveWatch
from tonle.bench.report import check_writable, remark
from tonle.bench.tables import print_report
from tonle.errors import ConfigError


@pytest.fixture(scope="module")
def report() -> BenchReport:
    """Two levels; two requests of the second fail."""
    broken = json_reply(503, {"error": {"message": "[busy] try later"}})
    behaviour = Behaviour(script=lambda asked: [broken] if asked.number in (5, 6) else None)
    with serving(behaviour) as server:
        return run_bench(
            BenchOptions(
                url=server.url, api_key="sk-secret", concurrency=(1, 2), requests=4, warmup=0,
                output_tokens=Span(4, 4), input_tokens=Span(8, 20), keep_requests=True,
            )
        )  # fmt: skip


def test_a_saved_report_reads_back(report: BenchReport, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    save_report(report, path)
    assert load_report(path) == report
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]
    document = json.loads(path.read_text())
    assert document["schema"] == "tonle.bench/1"
    assert document["settings"]["input_tokens"] == "8-20"
    assert document["settings"]["concurrency"] == [1, 2]
    assert document["environment"]["event_loop"]
    assert len(document["levels"][0]["rows"]) == 4


def test_the_key_is_not_saved(report: BenchReport, tmp_path: Path) -> None:
    save_report(report, tmp_path / "report.json")
    assert "sk-secret" not in (tmp_path / "report.json").read_text()


def test_a_failed_save_leaves_the_old_report(
    report: BenchReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        save_report(report, path)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


def test_places_that_cannot_be_written_to(tmp_path: Path) -> None:
    check_writable(tmp_path / "fine.json")
    for place in (tmp_path, tmp_path / "missing" / "report.json"):
        with pytest.raises(ConfigError, match="cannot save"):
            check_writable(place)


def test_what_is_no_report(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ConfigError, match="no report"):
        load_report(tmp_path / "x.json")
    with pytest.raises(ConfigError, match="cannot read"):
        load_report(tmp_path / "y.json")


def test_the_printed_report(report: BenchReport) -> None:
    out = io.StringIO()
    print_report(report, Console(file=out, width=100))
    text = out.getvalue()
    assert "model scripted  prompts ids" in text
    assert "4 of 4 requests answered" in text
    assert "failed 2×: HTTP 503: [busy] try later" in text  # brackets are no markup
    for word in ("TTFT", "TPOT", "ITL", "E2EL", "p99", "output tok/s", "cached"):
        assert word in text
    [heads] = [place for place, line in enumerate(text.splitlines()) if line.split()[:2] == ["users", "failed"]]
    assert text.splitlines()[heads + 2].split()[:2] == ["2", "2"]


@pytest.mark.parametrize("kind", [LineWatch, LiveWatch])
def test_progress_is_shown(kind: type[LineWatch] | type[LiveWatch]) -> None:
    out = io.StringIO()
    watch = kind(Console(file=out, width=100, force_terminal=kind is LiveWatch))
    with serving() as server:
        run_bench(BenchOptions(url=server.url, concurrency=(1, 2), requests=3, warmup=0), watch)
    text = out.getvalue()
    assert "concurrency 1" in text
    assert "concurrency 2" in text
    assert "3/3" in text


def test_letters_are_told_once() -> None:
    level = msgspec.structs.replace(made_level(), graphemes_per_s=81.5)
    out = io.StringIO()
    print_report(made_report([level]), Console(file=out, width=100))
    assert out.getvalue().count("letters/s") == 1 and "81.5 letters/s" in out.getvalue()


@pytest.mark.parametrize(("chunks", "is_told"), [(24, False), (20, False), (6, True)])
def test_far_fewer_chunks_than_tokens_are_told(chunks: int, is_told: bool) -> None:
    """As in Khmer, where text is held back until a letter is whole."""
    arrivals_s = [1.0 + 0.1 * place for place in range(chunks)]
    sample = Sample(
        index=0, start_s=0.0, end_s=4.0, last_s=4.0, arrivals_s=arrivals_s, output_tokens=24, prompt_tokens=9,
        cached_tokens=0,
    )  # fmt: skip
    notes = remark([report_level([sample], Circumstances(label="one"))], BenchOptions())
    assert (
        any(f"24 output tokens came in {chunks} chunks, as when a server guesses" in note for note in notes) == is_told
    )
