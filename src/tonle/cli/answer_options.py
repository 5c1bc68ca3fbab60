"""The options of `tonle chat` and `tonle run` that say how to answer, and the line of statistics after an answer.

An option that was not given is None: the model or the server decides.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tonle.cli import screen
from tonle.cli.backends import AnswerStats

_PANEL = "Answer"

SystemOption = Annotated[
    str | None,
    typer.Option("--system", metavar="TEXT", help="System message, placed before the chat.", rich_help_panel=_PANEL),
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        "-t",
        metavar="N",
        min=0.0,
        max=100.0,
        help="Higher is more random; 0 always takes the most likely token.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
TopPOption = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        metavar="N",
        min=0.0,
        max=1.0,
        help="Sample only from the most likely tokens whose probabilities add up to N.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        "-n",
        metavar="N",
        min=1,
        help="Longest answer, in tokens. Default: 1024 on a CPU, the rest of the context on a GPU.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        "--seed",
        metavar="N",
        help="The same seed gives the same answer again.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]


def summary(stats: AnswerStats) -> str:
    """`38 tokens · 52.1 tok/s · first token after 84 ms · context 210 of 8192`."""
    parts = [screen.count(stats.completion_tokens, "token" if stats.exact else "piece")]
    if stats.tokens_per_s is not None:
        parts.append(f"{stats.tokens_per_s:.1f} {'tok' if stats.exact else 'pieces'}/s")
    if stats.ttft_s is not None:
        parts.append(f"first token after {screen.duration(stats.ttft_s)}")
    num_used = stats.prompt_tokens + stats.completion_tokens
    if stats.context_length is not None and stats.exact:
        parts.append(f"context {num_used} of {stats.context_length}")
    if stats.finish_reason is None:
        parts.append("stopped")
    elif stats.finish_reason == "length":
        full = stats.context_length is not None and num_used >= stats.context_length
        limit = "" if stats.max_tokens is None else f" at max_tokens {stats.max_tokens}"
        parts.append("cut off: the context is full" if full else f"cut off{limit}")
    return " · ".join(parts)
