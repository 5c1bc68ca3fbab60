"""Guesses of bound sequences: what may be sampled behind those that are right, while the tokens of a step are drawn.

Does: lead constraints along guesses as a commit will, place after place, and lead them back. Does not: append tokens; a commit
does, after the draw.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import numpy as np

from tonle.engine.constraint import Constraint
from tonle.engine.plan import Plan
from tonle.engine.schedule.bound import may_force
from tonle.engine.schedule.sequence import Sequence


class BoundDrafts:
    """`AfterGuesses` of one plan. Afterwards its constraints are where they were."""

    def __init__(self, plan: Plan, mask_words: int, least: int) -> None:
        self._plan = plan
        self._mask_words = mask_words
        self._least = least  # forced tokens that are appended, as in `bound.push`
        self._saved: dict[int, Any] = {}  # by plan index, of those that were led on
        self._num_tokens: dict[int, int] = {}  # that these have got

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for i, saved in self._saved.items():
            self._constraint(i).restore(saved)

    def follow(self, i: int, token: int) -> list[int] | None:
        sequence: Sequence = self._plan.sequences[i]
        constraint = self._constraint(i)
        if i not in self._saved:
            self._saved[i] = constraint.save()
            self._num_tokens[i] = len(sequence.tokens)
        constraint.push(token)
        self._num_tokens[i] += 1
        forced: list[int] = []
        num_output = sequence.num_output + self._num_tokens[i] - len(sequence.tokens)
        if may_force(sequence, num_output) and not (constraint.is_complete or constraint.error):
            forced = constraint.forced(sequence.max_tokens - self._num_tokens[i], self._least)
            self._num_tokens[i] += len(forced)
        return None if constraint.is_complete or constraint.error else forced

    def mask(self, i: int) -> np.ndarray | None:
        mask = np.empty(self._mask_words, np.int32)
        return mask if self._constraint(i).fill(mask) else None

    def _constraint(self, i: int) -> Constraint:
        sequence: Sequence = self._plan.sequences[i]
        assert sequence.constraint is not None
        return sequence.constraint


def peek_forced(constraint: Constraint, most: int) -> list[int]:
    """The tokens that must follow. Nothing changes."""
    saved = constraint.save()
    forced = constraint.forced(most)
    constraint.restore(saved)
    return forced
