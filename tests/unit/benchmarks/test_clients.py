"""The comparison of clients: what is asked of each, what is read out of their files, when they agree."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from benchmarks.client_programs import ClientFailedError, Guidellm, Task, TonleBench, Turn, VllmBench
from benchmarks.clients import AGAIN, Row, ratios, report
from benchmarks.cpu_seconds import cpu_seconds, interpolate
from rich.console import Console

CLOSED = Task("http://127.0.0.1:1", "m", Path("/tokenizer"), "users", 2, ["a b", "c d"], 2, 4)
OPEN = replace(CLOSED, kind="rate", value=0.5)
TURN = Turn(
    ttft_ms=100.0, tpot_ms=10.0, output_tokens_per_s=80.0, requests_per_s=2.0, ttft_p50_ms=100.0, tpot_p50_ms=10.0
)


def pairs(command: list[str]) -> set[tuple[str, str]]:
    return set(pairwise(command))


def test_every_client_is_asked_for_the_same_load(tmp_path: Path) -> None:
    ours = pairs(TonleBench().command(CLOSED, tmp_path))
    assert {("--concurrency", "2"), ("--requests", "2"), ("--warmup", "0"), ("--temperature", "0")} <= ours
    vllm = pairs(VllmBench(Path("/vllm")).command(CLOSED, tmp_path))
    assert {
        ("--max-concurrency", "2"),
        ("--num-prompts", "2"),
        ("--custom-output-len", "4"),
        ("--num-warmups", "0"),
    } <= vllm
    guidellm = pairs(Guidellm(Path("/guidellm")).command(CLOSED, tmp_path))
    assert {("--profile", "kind=concurrent,streams=2"), ("--constraint", "kind=max_requests,count=2")} <= guidellm

    assert {("--rate", "0.5"), ("--arrivals", "constant")} <= pairs(TonleBench().command(OPEN, tmp_path))
    assert {("--request-rate", "0.5"), ("--burstiness", "inf")} <= pairs(VllmBench(Path("/v")).command(OPEN, tmp_path))
    assert ("--profile", "kind=constant,rate=0.5") in pairs(Guidellm(Path("/g")).command(OPEN, tmp_path))


def saved(folder: Path, result: dict[str, Any]) -> Path:
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def vllm_result(**changes: Any) -> dict[str, Any]:
    return {
        "completed": 2, "total_output_tokens": 8, "total_input_tokens": 4, "duration": 9.0,
        "start_times": [12.0, 11.0], "latencies": [2.0, 1.5],
        "mean_ttft_ms": 30.0, "mean_tpot_ms": 5.0, "median_ttft_ms": 29.0, "median_tpot_ms": 4.0,
    } | changes  # fmt: skip


def test_vllm_rates_count_from_the_first_request(tmp_path: Path) -> None:
    turn = VllmBench(Path("/vllm")).read(CLOSED, saved(tmp_path, vllm_result()))
    assert (turn.output_tokens_per_s, turn.requests_per_s) == (8 / 3, 2 / 3)  # from 11 to 14, not its 9 s
    assert (turn.ttft_ms, turn.tpot_ms, turn.begin, turn.end) == (30.0, 5.0, ("monotonic", 11.0), ("monotonic", 14.0))


@pytest.mark.parametrize("wrong", [{"completed": 1}, {"total_output_tokens": 7}, {"total_input_tokens": 5}])
def test_a_result_of_other_requests_is_refused(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(ClientFailedError, match="vllm bench serve"):
        VllmBench(Path("/vllm")).read(CLOSED, saved(tmp_path, vllm_result(**wrong)))


def test_guidellms_tpot_is_its_inter_token_latency(tmp_path: Path) -> None:
    names = ("time_to_first_token_ms", "inter_token_latency_ms", "time_per_output_token_ms", "output_tokens_per_second")
    metrics = {name: {"successful": {"mean": 1.0, "median": 2.0}} for name in (*names, "requests_per_second")}
    rows = [{"output_tokens": 4, "prompt_tokens": 2, "inter_token_latency_ms": latency} for latency in (6.0, 8.0)]
    benchmark = {"metrics": metrics, "requests": {"successful": rows}, "start_time": 5.0, "end_time": 6.0}
    turn = Guidellm(Path("/guidellm")).read(CLOSED, saved(tmp_path, {"benchmarks": [benchmark]}))
    assert (turn.ttft_ms, turn.tpot_ms, turn.begin) == (1.0, 7.0, ("wall", 5.0))


def rounds(client: str, factor: float) -> list[Row]:
    """Three rounds on a machine that gets slower from one to the next."""
    found = []
    for number, slow in enumerate((1.0, 1.5, 2.0), start=1):
        for name, times in (("tonle bench", slow), (AGAIN, slow), (client, slow * factor)):
            found.append(Row("1 user", number, name, replace(TURN, ttft_ms=100.0 * times), None))
    return found


def test_ratios_are_of_one_round() -> None:
    rows = rounds("guidellm", 1.04)
    assert ratios(rows, "guidellm", "ttft_ms") == pytest.approx([1.04] * 3)
    assert ratios(rows[:-2], "guidellm", "ttft_ms") == pytest.approx([1.04] * 2)  # the last round was cut short
    assert report(rows, Console(quiet=True))


def test_six_per_cent_are_no_agreement(capsys: pytest.CaptureFixture[str]) -> None:
    assert not report(rounds("guidellm", 1.06), Console())
    assert "differs: TTFT +6%" in capsys.readouterr().out


def test_without_a_whole_round_there_is_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert not report([row for row in rounds("guidellm", 1.0) if row.client == "guidellm"], Console())
    assert "agrees" not in capsys.readouterr().out


def test_cpu_time_between_samples() -> None:
    samples = [(10.0, 1.0), (12.0, 3.0), (13.0, 3.0)]
    assert [interpolate(samples, moment) for moment in (9.0, 10.0, 11.0, 12.0, 12.5, 20.0)] == [1, 1, 2, 3, 3, 3]


def test_cpu_time_includes_children_that_have_ended() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    parent = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}]); print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", parent]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        assert 0.2 <= cpu_seconds(process.pid) < 60  # the kernel counts in ticks of 10 ms, a few of which may be lost
        process.kill()
    assert cpu_seconds(process.pid) == 0.0
