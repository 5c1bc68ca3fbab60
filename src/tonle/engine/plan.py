"""The plan of one step: everything the scheduler tells the runner, and the only thing they share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from tonle.engine.request import ResolvedConfig, TokenLogprob


def num_equal(tokens: list[int], others: list[int]) -> int:
    """At the beginning of both."""
    count = min(len(tokens), len(others))
    return next((n for n in range(count) if tokens[n] != others[n]), count)


@dataclass(slots=True)
class Join:
    """A sequence takes a row of the batch, or takes one again after it was preempted."""

    row: int
    prompt: list[int]
    output: list[int]  # generated before a preemption; penalties and min_tokens count it
    config: ResolvedConfig
    seed: int
    adapter_slot: int = -1  # where the device has its adapter; -1 = none
    pooling: str = ""  # as `Request.pooling`


@dataclass(slots=True)
class Plan:
    """Parallel lists, one entry per scheduled row."""

    adapter_loads: list[tuple[int, int]] = field(default_factory=list)  # slot, adapter id: apply before all else
    joins: list[Join] = field(default_factory=list)  # apply next
    new_blocks: list[tuple[int, int, list[int]]] = field(default_factory=list)  # row, first place in its table, blocks
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # tokens of the row already in the cache
    chunks: list[list[int] | None] = field(default_factory=list)  # tokens to compute; None = the one sampled last
    samples: list[bool] = field(default_factory=list)  # the chunk ends at the last known token: sample the next
    sequences: list[Any] = field(default_factory=list)  # the scheduler's own, for its commit; the runner does not look
    # Entries that sample only what a grammar allows: `launch` leaves their draws to `draw_bound`.
    bound: list[int] = field(default_factory=list)
    missed: set[int] = field(default_factory=set)  # of these, those whose masks came late: they are not drawn
    # Entries that compute prompts. The last token of one, if it is left alone, counts as decoding.
    prompts: list[int] = field(default_factory=list)
    # Entry -> how many tokens at the end of its chunk are guesses. It samples at each of their places, and at the one before.
    drafts: dict[int, int] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(1 if chunk is None else len(chunk) for chunk in self.chunks)

    def place(self, i: int) -> int:
        """That the token sampled by entry `i` will take in its sequence; with drafts, the first of those sampled."""
        return self.starts[i] + (1 if (chunk := self.chunks[i]) is None else len(chunk)) - self.drafts.get(i, 0)

    def known_chunk(self, i: int) -> list[int] | None:
        """The chunk of entry `i` without its drafts."""
        chunk, count = self.chunks[i], self.drafts.get(i, 0)
        return chunk if chunk is None or not count else chunk[:-count]

    def draft(self, i: int) -> list[int]:
        """The guesses of entry `i`, which has some."""
        chunk = self.chunks[i]
        assert chunk is not None
        return chunk[-self.drafts[i] :]


class AfterGuesses(Protocol):
    """What bound entries of a plan may sample behind their guesses, place after place, as far as these are right."""

    def follow(self, i: int, token: int) -> list[int] | None:
        """Entry `i` has got `token`, as guessed. The tokens that must follow, and are not drawn; None: it ends here."""

    def mask(self, i: int) -> np.ndarray | None:
        """(words,) as in `Masks.allowed`, for the place after all that. None: any token."""


@dataclass(slots=True)
class Masks:
    """What bound entries of a plan may sample. Those of the plan that are not here are not sampled at all."""

    entries: list[int]  # plan indices
    allowed: np.ndarray  # (entries, words) int32: one bit per token of the vocabulary, the lowest bits first
    is_filled: list[bool]  # False: any token; its row of `allowed` says nothing
    after: AfterGuesses | None = None  # None: no bound entry has guesses


@dataclass(slots=True)
class StepResult:
    """What the runner read back, one entry per entry of the plan with `samples` set, in order."""

    tokens: list[int]
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # plan index -> of the sampled token
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(
        default_factory=dict
    )  # plan index -> of the chunk's successors
    pooled: dict[int, bytes] = field(default_factory=dict)  # plan index -> embedding of a prompt that is all computed
    # Plan index -> what was sampled at the places of drafts that were right, after the token in `tokens`
    more: dict[int, list[int]] = field(default_factory=dict)
    more_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)  # of those tokens
