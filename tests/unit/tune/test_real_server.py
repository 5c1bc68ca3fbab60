"""Tunings of real servers, from the command to files: any server by its command, and Tonle's own."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.fakes.checkpoints import save_folder
from tests.unit.tune.fake_server import SLO, folder_at
from tests.unit.tune.fake_server import result_for as made_result
from tonle.bench import BenchOptions, Span
from tonle.bench.report import load_report
from tonle.bench.server_process import ServerProcess
from tonle.tune.measurer import Measurer, NotMeasured
from tonle.tune.results import write_results
from tonle.tune.servers import TonleLauncher

SLOTS = Path(__file__).with_name("slots_server.py")


def command(out: Path, *more: str) -> list[str]:
    server = f"{shlex.quote(sys.executable)} {SLOTS} {{port}} {{slots}}"
    return [
        sys.executable, "-m", "tonle", "tune", "--server", "other", "--command", server, "--out", str(out), "--concurrency", "4",
        "--input-tokens", "8-20", "--output-tokens", "4-8", "--requests", "32", *more,
    ]  # fmt: skip


def test_any_server_by_its_command(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = command(out, "--values", "slots=1,4,5", "--maximize", "throughput", "--budget", "2m")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The best settings found are slots 4: their throughput is higher by more than chance." in done.stdout
    assert "default → tuned: TTFT p95 −" in done.stdout
    assert "slots 5 could not be measured" in done.stderr and "five slots are not supported" in done.stderr
    result = json.loads((out / "result.json").read_text())
    assert result["settings"] == {"slots": 4} and list(result["failed"]) == ["slots=5"]
    assert (out / "best.sh").read_text().endswith(f"{SLOTS} 8000 4\n")
    reports = [load_report(path) for path in sorted((out / "measurements").iterdir())]
    assert all(report.ok and report.levels[0].rows for report in reports)
    assert {report.settings["seed"] for report in reports} >= {0, 100, 101}  # new prompts in each round
    again = subprocess.run(words, capture_output=True, text=True, check=False)
    assert again.returncode == 0 and "going on in" in again.stderr
    assert again.stdout == done.stdout
    assert len(list((out / "measurements").iterdir())) == len(reports)  # nothing was measured again


def test_ctrl_c_leaves_results_and_no_server(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = command(out, "--values", "slots=1,2,3,4", "--ttft-p95", "10s", "--budget", "5m")
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as tuning:
        for _ in range(1200):
            if len(list(out.glob("measurements/*.json"))) >= 3:
                break
            time.sleep(0.05)
        os.kill(tuning.pid, signal.SIGINT)
        said, told = tuning.communicate(timeout=60)
    assert tuning.returncode == 130, said + told
    assert "what was found so far is kept" in told and "so far" in said
    assert json.loads((out / "result.json").read_text())["interrupted"]
    assert (out / "best.sh").exists() and (out / "report.html").exists()
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(out) not in running and not [
        line for line in running.splitlines() if f"{SLOTS} " in line and "tune" not in line
    ]


def test_tonle_is_started_measured_and_takes_the_best_settings(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_folder("llama", model, max_position_embeddings=2048)
    folder = folder_at(tmp_path / "out")
    options = BenchOptions(concurrency=(2,), input_tokens=Span(8, 20), output_tokens=Span(4, 8), slo=SLO, warmup=1)
    said: list[str] = []
    measurer = Measurer(TonleLauncher(str(model), {"max_model_len": 1024}, tmp_path), options, folder, said.append)
    try:
        settings = {"max_num_seqs": 2, "max_num_batched_tokens": 64}
        first = measurer.measure(settings, "search", 0, requests=6)
        second = measurer.measure(settings, "search", 1, requests=6)
    finally:
        measurer.close()
    assert first.report.ok and first.level.requests == 6 and first.level.slo
    assert first.tag.startup_s > 0 and second.tag.startup_s == 0  # the same server
    with pytest.raises(NotMeasured, match="long_prefill"):
        measurer.measure({"long_prefill_token_threshold": -3}, "search", 0, requests=6)
    assert "could not be measured" in said[0]
    write_results(made_result(settings), tmp_path, {"max_model_len": 1024, "model": str(model)})
    server = ServerProcess.tonle(None, ["--config", str(tmp_path / "best.yaml")], log=tmp_path / "log")
    with server, urllib.request.urlopen(f"{server.url}/v1/models") as answer:
        assert json.load(answer)["data"]
