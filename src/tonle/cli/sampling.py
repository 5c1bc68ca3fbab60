"""The options that say how to answer, shared by the verbs that ask, and what they say about an answer afterwards."""

from __future__ import annotations

from typing import Annotated

import typer

from tonle.cli import screen
from tonle.cli.voices import Sampling, Tally

_PANEL = "Answer"

SystemOption = Annotated[
    str | None,
    typer.Option("--system", metavar="TEXT", help="What the model is told first.", rich_help_panel=_PANEL),
]
TemperatureOption = Annotated[
    float,
    typer.Option("--temperature", "-t", metavar="N", min=0.0, max=100.0, help="0 is greedy.", rich_help_panel=_PANEL),
]
TopPOption = Annotated[
    float,
    typer.Option(
        "--top-p", metavar="N", min=0.0, max=1.0, help="Draw from the most likely tokens only.", rich_help_panel=_PANEL
    ),
]
MaxTokensOption = Annotated[
    int,
    typer.Option("--max-tokens", "-n", metavar="N", min=1, help="Longest answer, in tokens.", rich_help_panel=_PANEL),
]
SeedOption = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", help="Same seed, same answer.", rich_help_panel=_PANEL, show_default=False),
]

DEFAULT = Sampling()


def summary(tally: Tally, max_tokens: int) -> str:
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
        full = tally.completion_tokens < max_tokens
        parts.append("cut: the context is full" if full else f"cut at --max-tokens {max_tokens}")
    return " · ".join(parts)
