"""`StepOutcome`: what the commit of a step means to the callers."""

from __future__ import annotations

from dataclasses import dataclass, field

from tonle.engine.request import KeptBlocks, Request, TokenLogprob
from tonle.telemetry.time_spent import TimeSpent

Ending = tuple[str, int | None]  # why a sequence ends, the stop token that matched


@dataclass(slots=True)
class StepOutcome:
    """In parallel lists: `handles[i]` got the next `counts[i]` of `tokens`."""

    handles: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finished: dict[int, Ending] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)  # handle -> why it cannot go on
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprob]]] = field(default_factory=dict)
    embeddings: dict[int, bytes] = field(default_factory=dict)
    spent: dict[int, TimeSpent] = field(default_factory=dict)  # of those that ended
    # Handle -> guesses that the step checked for it, and how many of them were right
    guesses: dict[int, tuple[int, int]] = field(default_factory=dict)
    # Those that ended and whose blocks are kept for another engine: the scheduler has the blocks, the loop tells where.
    leased: list[Request] = field(default_factory=list)
    kept: dict[int, KeptBlocks] = field(default_factory=dict)
    other_counts: dict[int, int] = field(default_factory=dict)  # place in `handles` -> tokens, where not one

    @property
    def counts(self) -> list[int]:
        counts = [1] * len(self.handles)
        for place, count in self.other_counts.items():
            counts[place] = count
        return counts

    def add(self, handle: int, tokens: list[int]) -> None:
        """So many tokens of one sequence."""
        self.other_counts[len(self.handles)] = len(tokens)
        self.handles.append(handle)
        self.tokens += tokens
