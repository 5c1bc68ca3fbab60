"""The options that say how to answer, shared by the verbs that ask, and what they say about an answer afterwards."""

from __future__ import annotations

from typing import Annotated

import typer

from tonle.cli import screen
from tonle.cli.flags import explain
from tonle.cli.voices import Tally
from tonle.config.serve import SETTINGS

_PANEL = "Answer"

SystemOption = Annotated[
    str | None,
    typer.Option("--system", metavar="TEXT", help="What the model is told first.", rich_help_panel=_PANEL),
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        "-t",
        metavar="N",
        min=0.0,
        max=100.0,
        help=explain("0 is greedy.", "the model's"),
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
        help=explain("Draw from the most likely tokens only.", "the model's"),
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
        help=explain("Longest answer, in tokens.", SETTINGS["default_max_tokens"].type.show(None)),
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", help="Same seed, same answer.", rich_help_panel=_PANEL, show_default=False),
]


def summary(tally: Tally, max_tokens: int | None) -> str:
    """`38 tokens · 52.1 tok/s · first token after 84 ms · context 210 of 8192`."""
    parts = [f"{tally.completion_tokens} {'tokens' if tally.exact else 'pieces'}"]
    if tally.tokens_per_s is not None:
        parts.append(f"{tally.tokens_per_s:.1f} {'tok' if tally.exact else 'pieces'}/s")
    if tally.ttft_s is not None:
        parts.append(f"first token after {screen.duration(tally.ttft_s)}")
    if tally.context_length is not None:
        parts.append(f"context {tally.prompt_tokens + tally.completion_tokens} of {tally.context_length}")
    if tally.finish_reason is None:
        parts.append("stopped")
    elif tally.finish_reason == "length":
        full = max_tokens is not None and tally.completion_tokens < max_tokens
        limit = "" if max_tokens is None else f" at --max-tokens {max_tokens}"
        parts.append("cut: the context is full" if full else f"cut{limit}")
    return " · ".join(parts)
