"""`Constraint`: what the tokens of one sequence must be. The scheduler drives it, and does not know what is behind it.

With `Runner.lag` 1 the step after a token is computed before the host has read that token. So: `push` and `forced` are called
when a step is committed, `fill` after that, for the step that has been launched meanwhile and waits with its sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tonle.engine.request import Request


class Constraint(Protocol):
    def push(self, token: int) -> None:
        """The sequence has this token now. Never raises: see `error`."""

    def forced(self, most: int, least: int = 1) -> list[int]:
        """Tokens that must follow, at most `most`; never the end of the answer, which `is_complete` says. They count as pushed.

        Empty, and nothing has changed: the next one is a choice, or they are fewer than `least`.
        """

    def fill(self, mask: np.ndarray) -> bool:
        """Which tokens may come next, one bit each, into (words,) int32. False: any may, and nothing was written."""

    def fits(self, tokens: list[int]) -> int:
        """How many of these, guessed, may come one after the other. Nothing changes. Too many are no mistake, but time lost."""

    @property
    def takes_guesses(self) -> bool:
        """Guesses can be led along here: `save` and `restore` may be called. Where not, `fits` is 0."""

    def save(self) -> Any:
        """Where it stands, for `restore`. Only while it `takes_guesses`."""

    def restore(self, saved: Any) -> None:
        """As it was when this was saved. An `error` stays."""

    @property
    def is_complete(self) -> bool:
        """No token may follow but the end."""

    @property
    def error(self) -> str | None:
        """Why it cannot go on; None while it can."""


@dataclass(slots=True)
class Compiled:
    """What became of a request that was given to a compiler."""

    request: Request
    constraint: Constraint | None  # None: see `error`
    error: str = ""  # the caller's mistake, in words for the caller


def needs_constraint(request: Request) -> bool:
    """What it may generate depends on what it has generated."""
    thinking = request.config.thinking
    return bool(request.grammar) or (thinking is not None and thinking.budget is not None)


class ConstraintCompiler(Protocol):
    """Makes constraints on a thread of its own. All methods are called from the loop's thread."""

    mask_words: int  # of a mask: ceil(vocabulary of the model / 32)

    def ask(self, request: Request) -> None:
        """Begin. The request waits for `take`."""

    def forget(self, handle: int) -> None:
        """It was cancelled: `take` will not return it."""

    def take(self) -> list[Compiled]:
        """Those that are done since the last call."""

    @property
    def is_busy(self) -> bool:
        """Something was asked for that has not been taken."""

    def fill(self, constraints: list[Constraint], masks: np.ndarray, wait_s: float | None = None) -> list[bool | None]:
        """`Constraint.fill` of each into its row of masks (n, words), side by side where that is quicker. None: it takes longer
        than `wait_s`. Nothing but `fill`, `is_late` and `drop_mask` may be asked about that constraint until it is filled."""

    def is_late(self, constraint: Constraint) -> bool:
        """Its mask is still being filled. If not, `fill` has it at once."""

    def drop_mask(self, constraint: Constraint) -> None:
        """It will not be filled again: its sequence has ended."""

    def close(self) -> None: ...
