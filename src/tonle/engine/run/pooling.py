"""Embeddings in a step: whose hidden states are wanted, and the vector that those of a prompt become.

Does: know the rows that want one, sum over the steps that a prompt takes. Does not: compute hidden states (the model does), or
scale vectors to length 1 (the front does).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tonle.engine.plan import Join, Plan


@dataclass(slots=True)
class PooledRow:
    pooling: str
    num_tokens: int  # of its prompt
    total: torch.Tensor | None = None  # (hidden,) float32: sum of the states so far


@dataclass(frozen=True, slots=True)
class WantedStates:
    """Hidden states of one row in one step."""

    place: int  # plan index
    row: int
    first: int  # among the step's tokens
    count: int
    is_end: bool  # the prompt is computed with this step


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Of the prompts that a step ends."""

    places: list[int]  # plan indices
    vectors: torch.Tensor  # (len(places), hidden) float32

    def as_bytes(self) -> dict[int, bytes]:
        """By plan index, little-endian. The vectors must be on the host."""
        array = self.vectors.numpy().astype("<f4", copy=False)
        return {place: array[i].tobytes() for i, place in enumerate(self.places)}


class RowPools:
    """The rows whose prompts become embeddings. A row is forgotten when its prompt is computed, or at its next join."""

    def __init__(self) -> None:
        self.rows: dict[int, PooledRow] = {}

    def join(self, join: Join) -> None:
        self.rows.pop(join.row, None)
        if join.pooling:
            self.rows[join.row] = PooledRow(join.pooling, len(join.prompt))

    def wanted(self, plan: Plan, begins: list[int]) -> list[WantedStates]:
        """`begins`: by plan index, where its tokens begin among the step's."""
        found = []
        for place, row in enumerate(plan.rows):
            pooled, chunk = self.rows.get(row), plan.chunks[place]
            if pooled is None or chunk is None:
                continue
            is_end = plan.starts[place] + len(chunk) == pooled.num_tokens
            if pooled.pooling == "mean":
                found.append(WantedStates(place, row, begins[place], len(chunk), is_end))
            elif is_end:
                found.append(WantedStates(place, row, begins[place] + len(chunk) - 1, 1, is_end))
        return found

    def add(self, row: int, states: torch.Tensor) -> None:
        """States (n, hidden) float32 of the row's next tokens."""
        pooled = self.rows[row]
        total = states[0] if len(states) == 1 else states.sum(dim=0)
        pooled.total = total if pooled.total is None else pooled.total + total

    def finish(self, wanted: list[WantedStates]) -> Embeddings | None:
        """Of those whose prompts end, once all states of the step have been added. None: no prompt ends."""
        vectors = []
        ended = [each for each in wanted if each.is_end]
        for each in ended:
            pooled = self.rows.pop(each.row)
            assert pooled.total is not None
            vectors.append(pooled.total / pooled.num_tokens if pooled.pooling == "mean" else pooled.total)
        return Embeddings([each.place for each in ended], torch.stack(vectors)) if ended else None


def token_indices(wanted: list[WantedStates]) -> list[int]:
    """Of all their tokens, row after row."""
    return [index for each in wanted for index in range(each.first, each.first + each.count)]
