"""`tonle bench scenarios` from the outside: exit status, the saved report, options before the subcommand."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tonle
from tests.unit.bench.scripted import Behaviour, json_reply, serving
from tests.unit.bench.scripted_engine import LibraryEngine
from tonle.cli.app import app
from tonle.errors import ModelError

runner = CliRunner()

COMMAND = ["bench", "scenarios"]
QUICK = ["--requests", "5", "--warmup", "0", "--concurrency", "2", "--sla", "60"]


def test_all_well_is_zero(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    with serving(Behaviour(inference=True)) as server:
        result = runner.invoke(app, [*COMMAND, "--url", f"{server.url}/v1", "--json", str(path), "--seed", "4", *QUICK])
    assert result.exit_code == 0, result.output
    assert result.stdout.count("✓ PASS (P95 < 60.0s)") == 3
    assert "concurrent, 2 at once: done, 5/5 answered" in result.stderr and "req/s" in result.stderr
    document = json.loads(path.read_text())
    assert document["schema"] == "tonle.bench.scenarios/1"
    assert document["seed"] == document["settings"]["seed"] == 4
    assert [each["cache_hits"] for each in document["scenarios"]] == [0, 2, 0]
    assert "api_key" not in document["settings"]


def test_a_missed_target_is_one() -> None:
    with serving(Behaviour(inference=True, first_pause_s=0.02)) as server:
        result = runner.invoke(app, [*COMMAND, "--url", server.url, *QUICK, "--sla", "0.01"])
    assert result.exit_code == 1
    assert "✗ FAIL (P95" in result.stdout and "≥ 0.01s" in result.stdout


def test_a_failed_request_is_one_even_within_the_target() -> None:
    broken = json_reply(500, {"error": {"message": "boom"}})
    with serving(Behaviour(inference=True, script=lambda asked: [broken] if asked.number == 1 else None)) as server:
        result = runner.invoke(app, [*COMMAND, "--url", server.url, *QUICK, "--requests", "40"])
    assert result.exit_code == 1
    assert result.stdout.count("✓ PASS") == 3 and "failed 1×: HTTP 500: boom" in result.stdout


def test_quiet_prints_nothing() -> None:
    with serving(Behaviour(inference=True)) as server:
        result = runner.invoke(app, [*COMMAND, "--url", server.url, "--quiet", *QUICK])
    assert result.exit_code == 0 and result.output == ""


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--requests", "0"], "requests"),
        (["--sla", "-1"], "sla"),
        (["--url", "ftp://x"], "http://"),
        (["--url", "http://x", "--library"], "not both"),
        (["--json", "/nonexistent/report.json"], "cannot save"),
        (["--concurrency", "1,4"], "concurrency"),
        (["--url", "http://127.0.0.1:9"], "tonle serve"),
    ],
)
def test_what_cannot_start_is_two(args: list[str], why: str) -> None:
    result = runner.invoke(app, [*COMMAND, *args])
    assert result.exit_code == 2
    assert why in result.stderr


def test_options_before_the_subcommand_are_refused() -> None:
    result = runner.invoke(app, ["bench", "--url", "http://127.0.0.1:9", "scenarios"])
    assert result.exit_code == 2
    assert "put --url after `scenarios`" in result.stderr


def test_without_a_subcommand_it_measures_levels() -> None:
    with serving() as server:
        result = runner.invoke(
            app, ["bench", "--url", server.url, "--concurrency", "2", "--requests", "2", "--warmup", "0"]
        )
    assert result.exit_code == 0, result.output
    assert "TTFT" in result.stdout and "concurrency 2" in result.stdout


def test_the_librarys_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    closed: list[bool] = []

    @contextlib.contextmanager
    def create(**settings: Any) -> Iterator[LibraryEngine]:
        calls.append(settings)
        yield LibraryEngine()
        closed.append(True)

    monkeypatch.setattr(tonle, "create_optimized_engine", create, raising=False)
    result = runner.invoke(app, [*COMMAND, "--library", "--model", "./folder", *QUICK])
    assert result.exit_code == 0, result.output
    assert calls == [{"model_path": "./folder", "enable_cache": True}] and closed
    assert "LibraryEngine  model ./folder  generate_async" in result.stdout


def test_ctrl_c_prints_and_saves_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(number: int) -> None:
        if number == 4:
            os.kill(os.getpid(), signal.SIGINT)

    engine = contextlib.nullcontext(LibraryEngine(interrupt))
    monkeypatch.setattr(tonle, "create_optimized_engine", lambda **settings: engine, raising=False)
    result = runner.invoke(app, [*COMMAND, "--library", "--json", str(tmp_path / "out.json"), *QUICK])
    assert result.exit_code == 130
    assert "Total Requests:      3" in result.stdout or "Total Requests:      4" in result.stdout
    assert "interrupted: requests still under way are not counted" in result.stdout
    assert json.loads((tmp_path / "out.json").read_text())["interrupted"] is True


def test_a_model_that_cannot_be_loaded_is_two(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(**settings: Any) -> Any:
        raise ModelError("no such folder")

    monkeypatch.setattr(tonle, "create_optimized_engine", create, raising=False)
    result = runner.invoke(app, [*COMMAND, "--library", *QUICK])
    assert result.exit_code == 2 and "no such folder" in result.stderr
