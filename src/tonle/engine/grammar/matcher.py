"""`GrammarConstraint`: one sequence's place in a grammar, behind the protocol that the scheduler knows."""

from __future__ import annotations

from collections.abc import Set

import numpy as np
from llguidance import LLMatcher

_MAX_MESSAGE_CHARS = 600


class GrammarConstraint:
    __slots__ = ("_ends", "matcher")

    def __init__(self, matcher: LLMatcher, ends: Set[int]) -> None:
        self.matcher = matcher  # its own: a copy of the compiled one
        self._ends = ends  # tokens that end an answer

    def push(self, token: int) -> None:
        if not self.matcher.is_stopped():
            self.matcher.consume_token(token)

    def forced(self, most: int, least: int = 1) -> list[int]:
        if most < max(least, 1) or self.matcher.is_stopped():
            return []
        tokens = self.matcher.compute_ff_tokens()[:most]
        if not self._ends.isdisjoint(tokens):  # a grammar may name one: it is sampled, so that the answer ends with it
            tokens = tokens[: next(i for i, token in enumerate(tokens) if token in self._ends)]
        if len(tokens) < max(least, 1):
            return []
        self.matcher.consume_tokens(tokens)
        return tokens

    def fill(self, mask: np.ndarray) -> bool:
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return True

    def allows(self, token: int) -> bool:
        return self.matcher.validate_tokens([token]) == 1

    def restart(self) -> None:
        """As if nothing had been pushed."""
        self.matcher.reset()

    @property
    def is_complete(self) -> bool:
        return self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def error(self) -> str | None:
        return clean(self.matcher.get_error()) if self.matcher.is_error() else None


def clean(message: str) -> str:
    """llguidance's words, without its mark for what it left out, and not endless."""
    text = message.replace("<non-verbose/>", "").strip()
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[:_MAX_MESSAGE_CHARS] + " …"
