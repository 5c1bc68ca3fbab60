"""`tonle bench` from the outside: exit status, files, Ctrl-C, and no torch."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.unit.bench.scripted import (
    STREAM_END,
    STREAM_HEAD,
    Asked,
    Behaviour,
    Script,
    json_reply,
    serving,
    text_event,
    usage_event,
)
from tonle.cli.bench import bench

runner = CliRunner()

QUICK = ["--requests", "3", "--warmup", "0", "--output-tokens", "4", "--input-tokens", "8-16"]


def test_all_well_is_zero(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    with serving() as server:
        result = runner.invoke(
            bench, ["--url", f"{server.url}/v1", "--concurrency", "1,2", "--json", str(path), *QUICK]
        )
    assert result.exit_code == 0, result.output
    assert "TTFT" in result.stdout
    document = json.loads(path.read_text())
    assert [level["concurrency"] for level in document["levels"]] == [1, 2]
    assert len(document["levels"][1]["rows"]) == 3


def test_some_failures_are_one_and_still_saved(tmp_path: Path) -> None:
    broken = json_reply(500, {"error": {"message": "boom"}})
    path = tmp_path / "out.json"
    with serving(Behaviour(script=lambda asked: [broken] if asked.number == 2 else None)) as server:
        result = runner.invoke(bench, ["--url", server.url, "--json", str(path), *QUICK])
    assert result.exit_code == 1
    assert "HTTP 500: boom" in result.stdout
    assert json.loads(path.read_text())["levels"][0]["failures"] == [{"example": "HTTP 500: boom", "count": 1}]


def test_rows_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    with serving() as server:
        runner.invoke(bench, ["--url", server.url, "--json", str(path), "--no-save-requests", *QUICK])
    assert json.loads(path.read_text())["levels"][0]["rows"] is None


def test_a_missed_slo_is_one_and_said_so() -> None:
    with serving(Behaviour(first_pause_s=0.02)) as server:
        args = ["--url", server.url, *QUICK]
        held = runner.invoke(bench, [*args, "--ttft-p95", "60s"])
        missed = runner.invoke(bench, [*args, "--ttft-p95", "5ms", "--slo", "e2el-p50=60s"])
    assert held.exit_code == 0
    assert "✓ TTFT p95 ≤ 60 s: " in held.stdout
    assert "100.0% of requests keep every limit" in held.stdout
    assert missed.exit_code == 1
    assert "✗ TTFT p95 ≤ 5 ms: " in missed.stdout
    assert "✓ E2EL p50 ≤ 60 s: " in missed.stdout
    assert "goodput 0.00 req/s: 0.0% of requests" in missed.stdout


def test_a_sweep_is_zero_though_its_last_levels_miss_the_slo() -> None:
    """Each more under way makes the server slower: 100 ms are over with some number of them."""
    under_way = 0

    def slower(asked: Asked) -> Script:
        nonlocal under_way
        under_way += 1
        yield STREAM_HEAD
        yield 0.02 * under_way
        yield text_event(" a", "length") + usage_event(8, asked.body["max_tokens"], 0) + STREAM_END
        under_way -= 1

    with serving(Behaviour(script=slower)) as server:
        args = [
            "--url",
            server.url,
            "--sweep",
            "concurrency",
            "--e2el-p95",
            "100ms",
            "--warmup",
            "0",
            "--requests",
            "24",
        ]
        result = runner.invoke(bench, args, env={"COLUMNS": "300"})
        none = runner.invoke(bench, [*args, "--e2el-p99", "1ms"])
    assert result.exit_code == 0, result.output
    assert "saturation: " in result.stdout
    assert "E2EL p95 ≤ 100 ms" in result.stdout
    assert none.exit_code == 1
    assert "saturation: not found" in none.stdout


def test_quiet_prints_nothing() -> None:
    with serving() as server:
        result = runner.invoke(bench, ["--url", server.url, "--quiet", *QUICK])
    assert result.exit_code == 0
    assert result.output == ""


def test_the_key_comes_from_the_environment() -> None:
    with serving(Behaviour(key="k")) as server:
        assert runner.invoke(bench, ["--url", server.url, *QUICK], env={"OPENAI_API_KEY": "k"}).exit_code == 0
        refused = runner.invoke(bench, ["--url", server.url, *QUICK], env={"OPENAI_API_KEY": "x"})
    assert refused.exit_code == 2
    assert "--api-key" in refused.stderr


def test_nobody_there_is_two() -> None:
    with serving() as server:
        pass
    result = runner.invoke(bench, ["--url", server.url])
    assert result.exit_code == 2
    assert "connection refused" in result.stderr
    assert "tonle serve" in result.stderr


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--concurrency", "two"], "concurrency"),
        (["--concurrency", "1.5"], "whole number"),
        (["--concurrency", "2", "--rate", "1"], "not both"),
        (["--rate", "0"], "rate"),
        (["--concurrency", "2", "--ramp", "1-5"], "not both"),
        (["--ramp", "5"], "two rates"),
        (["--ramp", "1-5"], "needs a duration"),
        (["--arrivals", "gamma"], "open loop"),
        (["--arrivals", "sometimes"], "constant"),
        (["--sweep", "rate", "--rate", "1,2"], "one rate"),
        (["--processes", "0"], "processes"),
        (["--ttft-p95", "soon"], "200ms"),
        (["--slo", "ttft-p95"], "ttft-p95=200ms"),
        (["--input-tokens", "9-3"], "input_tokens"),
        (["--extra-body", "[1]"], "JSON object"),
        (["--extra-body", "{"], "not JSON"),
        (["--url", "ftp://x"], "http://"),
        (["--file", "/nonexistent.jsonl"], "cannot read"),
        (["--json", "/nonexistent/report.json"], "cannot save"),
    ],
)
def test_wrong_settings_are_two(args: list[str], why: str) -> None:
    result = runner.invoke(bench, args)
    assert result.exit_code == 2
    assert why in result.stderr


def test_ctrl_c_prints_and_saves_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    code = "from tonle.cli.bench import bench; bench()"
    with serving(Behaviour(pause_s=0.002)) as server:
        args = ["--url", server.url, "--requests", "1000000", "--output-tokens", "4", "--json", str(path)]
        process = subprocess.Popen(
            [sys.executable, "-c", code, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            deadline = time.monotonic() + 60
            while len(server.completions) < 8 and time.monotonic() < deadline:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, stderr
    assert "interrupted" in stdout
    assert "TTFT" in stdout
    document = json.loads(path.read_text())
    assert document["interrupted"] is True
    assert document["levels"][0]["succeeded"] >= 1


def test_no_torch() -> None:
    code = """
import sys
import tonle.bench, tonle.bench.tables, tonle.bench.progress
loaded = {name.split(".")[0] for name in sys.modules} | {".".join(name.split(".")[:2]) for name in sys.modules}
assert not loaded & {"torch", "transformers", "numpy", "tonle.engine", "tonle.models"}, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
