"""What `gpu.py` has measured beside what we aim for, and beside vLLM on the same kind of machine.

Does: the table of docs/performance.md, as far as rows are there. Does not: measure. vLLM 0.25.1 had the same kind of driver and
random weights of the same models on an H200.
"""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tonle import __version__

Q, L = "qwen2.5-1.5b", "llama-3.2-3b"
LARGE, EXPERTS = "llama-3.1-8b", "qwen3-30b-a3b"


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure of one row, and its bound."""

    model: str
    workload: str
    users: int | None
    column: str
    bound: float
    least: bool = False  # the bound is the least that will do, not the most

    def figure(self, rows: list[dict[str, Any]]) -> float | None:
        for row in rows:
            users = row.get("users") if self.users is not None else None
            if (row["model"], row["workload"], users) == (self.model, self.workload, self.users):
                figure = row[self.column]
                return min(figure) if isinstance(figure, list) else float(figure)
        return None

    def holds(self, figure: float) -> bool:
        return figure >= self.bound if self.least else figure <= self.bound

    def __str__(self) -> str:
        return f"{'≥' if self.least else '≤'} {text_of(self.bound, self.column)}"


def _serving(model: str, users: int, tokens_per_s: float, ttft_ms: float) -> list[Goal]:
    return [Goal(model, "serving", users, "out_tok_s", tokens_per_s, least=True),
            Goal(model, "serving", users, "ttft_p99", ttft_ms)]  # fmt: skip


LINES: list[tuple[str, str, list[Goal]]] = [
    ("q1.5b, one user, ms/token", "2.14", [Goal(Q, "decode1", 1, "tpot_mean", 1.05)]),
    ("l3b, one user, ms/token", "2.88", [Goal(L, "decode1", 1, "tpot_mean", 1.85)]),
    ("q1.5b, 32-token prompt, one user, TTFT mean ms", "12.4", [Goal(Q, "decode1", 1, "ttft_mean", 4)]),
    ("q1.5b, 100 users, out tok/s · TTFT p99 ms", "13,345 · 265", _serving(Q, 100, 27_000, 130)),
    ("q1.5b, 256 users", "15,939 · 1,035", _serving(Q, 256, 42_000, 400)),
    ("l3b, 100 users", "12,381 · 418", _serving(L, 100, 20_000, 200)),
    ("l3b, 256 users", "16,290 · 757", _serving(L, 256, 32_000, 400)),
    ("offline 256, streamed, q1.5b · l3b", "18,408 · 15,609", [
        Goal(Q, "offline", 256, "out_tok_s", 38_000, least=True), Goal(L, "offline", 256, "out_tok_s", 25_000, least=True)]),
    ("the same through `LLM`", "27–32k · 16.3k", [
        Goal(Q, "offline_api", None, "out_tok_s", 45_000, least=True),
        Goal(L, "offline_api", None, "out_tok_s", 26_000, least=True)]),
    ("start to ready, kernels compiled before, q1.5b · l3b, s", "69",
     [Goal(Q, "decode1", 1, "ready_s", 12), Goal(L, "decode1", 1, "ready_s", 12)]),
    ("HTTP through the gateway, 100 users, q1.5b, of the engine's", "–",
     [Goal(Q, "gateway", 100, "engine_share", 0.7, least=True)]),
    ("l8b, one user, of the weight-read floor", "–", [Goal(LARGE, "decode1", 1, "floor_share", 0.85, least=True)]),
    ("30b-a3b, one user, ms/token", "–", [Goal(EXPERTS, "decode1", 1, "tpot_mean", 2.6)]),
    ("30b-a3b, 100 · 256 users, out tok/s", "–", [
        Goal(EXPERTS, "serving", 100, "out_tok_s", 5_500, least=True),
        Goal(EXPERTS, "serving", 256, "out_tok_s", 12_000, least=True)]),
]  # fmt: skip


def text_of(figure: float, column: str) -> str:
    if column in ("engine_share", "floor_share"):
        return f"{figure:.1%}"
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.1f}" if figure >= 10 else f"{figure:.2f}"


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Lines of markdown: those of which something was measured."""
    lines = [(*line, [goal.figure(rows) for goal in line[2]]) for line in LINES]
    measured = [line for line in lines if any(figure is not None for figure in line[3])]
    if measured:
        yield "| | vLLM 0.25.1 | target | Tonle | |"
        yield "|---|---|---|---|---|"
    for title, vllm, goals, figures in measured:
        texts = ["not run" if f is None else text_of(f, goal.column) for f, goal in zip(figures, goals, strict=True)]
        known = [goal.holds(f) for f, goal in zip(figures, goals, strict=True) if f is not None]
        verdict = "holds" if all(known) else "partly" if any(known) else "missed"
        yield f"| {title} | {vllm} | {' · '.join(map(str, goals))} | {' · '.join(texts)} | {verdict} |"


def machine() -> str:
    """When and on what."""
    parts = [
        time.strftime("%Y-%m-%d"),
        f"Tonle {__version__}",
        f"Python {platform.python_version()}",
        f"torch {torch.__version__}",
    ]
    if torch.cuda.is_available():
        import triton

        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()
        parts += [f"triton {triton.__version__}", f"{torch.cuda.get_device_name()} (driver {driver or 'unknown'})"]
    return ", ".join(parts)
