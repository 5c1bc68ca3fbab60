"""The table at the end of the GPU benchmark: from rows to verdicts."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_targets import LINES, table
from benchmarks.workload import weight_bytes


def verdicts(rows: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """By title: what is said of the figures."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in list(table(rows))[2:]]
    return {title: (figures, verdict) for title, _, _, figures, verdict in cells}


def row(model: str, workload: str, users: int, **figures: float) -> dict[str, Any]:
    return {"model": model, "workload": workload, "users": users, **figures}


def test_lines_say_what_holds_and_what_does_not() -> None:
    found = verdicts([
        row("qwen2.5-1.5b", "decode1", 1, tpot_mean=1.1, ttft_mean=2.6, ready_s=7.4),
        row("llama-3.2-3b", "serving", 100, out_tok_s=21_032.8, ttft_p99=210.1),
        row("qwen2.5-1.5b", "serving", 100, out_tok_s=37_000, ttft_p99=118),
        row("qwen2.5-1.5b", "gateway", 100, engine_share=1.007),
        row("llama-3.1-8b", "decode1", 1, tpot_mean=4.2, floor_share=0.842),
        row("qwen3-30b-a3b", "decode1", 1, tpot_mean=2.1),
        row("qwen3-30b-a3b", "serving", 100, out_tok_s=5_600.0),
        {"model": "qwen2.5-1.5b", "workload": "offline_api", "out_tok_s": [39_338.0, 39_148.0]},
    ])  # fmt: skip
    assert found == {
        "q1.5b, one user, ms/token": ("1.10", "missed"),
        "q1.5b, 32-token prompt, one user, TTFT mean ms": ("2.60", "holds"),
        "l3b, 100 users": ("21,033 · 210", "partly"),
        "q1.5b, 100 users, out tok/s · TTFT p99 ms": ("37,000 · 118", "holds"),
        "the same through `LLM`": ("39,148 · not run", "missed"),
        "start to ready, kernels compiled before, q1.5b · l3b, s": ("7.40 · not run", "holds"),
        "HTTP through the gateway, 100 users, q1.5b, of the engine's": ("100.7%", "holds"),
        "l8b, one user, of the weight-read floor": ("84.2%", "missed"),
        "30b-a3b, one user, ms/token": ("2.10", "holds"),
        "30b-a3b, 100 · 256 users, out tok/s": ("5,600 · not run", "holds"),
    }


def test_what_was_not_run_is_left_out() -> None:
    assert list(table([row("tiny", "decode1", 1, tpot_mean=1.0)])) == [] and len(LINES) == 14


def test_a_step_reads_the_experts_that_its_rows_choose() -> None:
    """8 of 128 experts are read for one row, nearly all of them for 100."""
    one, many = weight_bytes("qwen3-30b-a3b"), weight_bytes("qwen3-30b-a3b", 100)
    expert = 2 * 48 * 3 * 2048 * 768
    assert abs((many - one) / expert - 119.8) < 0.1
    assert 2 * 3.03e9 < one < 2 * 3.05e9  # 3.3 billion are active, 0.3 of them the input embedding
    assert weight_bytes("llama-3.1-8b", 100) == weight_bytes("llama-3.1-8b")
