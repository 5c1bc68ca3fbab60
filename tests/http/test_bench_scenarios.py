"""`tonle bench scenarios` against the real routes and the real response cache, in front of a scripted engine."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from tonle.bench import ScenarioReport, load_scenario_report
from tonle.cli.app import app


def scenarios(url: str, path: Path, *args: str) -> ScenarioReport:
    command = [
        "bench",
        "scenarios",
        "--url",
        url,
        "--model",
        "scripted",
        "--requests",
        "10",
        "--sla",
        "60",
        "--output-tokens",
        "8",
    ]
    result = CliRunner().invoke(app, [*command, "--json", str(path), "--save-requests", *args])
    assert result.exit_code == 0, result.output
    return load_scenario_report(path)


def test_repeats_are_hits_and_only_with_the_cache(url: str, tmp_path: Path) -> None:
    report = scenarios(url, tmp_path / "a.json", "--seed", "1")
    assert report.asked_by == "/api/v1/inference" and report.notes == []
    assert [each.cache_hit_rate for each in report.scenarios] == [0.0, 0.4, 0.0]
    for each in report.scenarios:
        assert each.succeeded == 10 and 1 <= each.output_tokens <= 80
    rows = report.scenarios[1].rows
    assert rows is not None and rows[0].cache_hit is False, "the first question is new"


def test_a_second_run_with_the_same_seed_says_that_answers_were_known(url: str, tmp_path: Path) -> None:
    first, second = (scenarios(url, tmp_path / "b.json", "--seed", "2") for _ in range(2))
    assert first.notes == [] and second.scenarios[1].cache_hit_rate == 1.0
    assert len(second.notes) == 1 and "use another seed" in second.notes[0]
