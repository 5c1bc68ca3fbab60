"""Which part of a conversation is sent to a model again: its newest turns, whole, and what stands before all of them.

Does: choose, by a number of messages and by what fits. Does not: count tokens; the caller says what fits, by an estimate or with
a tokenizer.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

M = TypeVar("M")  # a message

INSTRUCTIONS = ("system", "developer")  # roles of messages that stay, at the beginning


@dataclass(frozen=True, slots=True)
class RecentHistory(Generic[M]):
    messages: list[M]  # those kept, oldest first
    turns_dropped: int
    over_window: int  # messages dropped because there were more than the window allows
    over_length: int  # messages dropped because they did not fit

    @property
    def messages_dropped(self) -> int:
        return self.over_window + self.over_length


def recent(
    history: Sequence[M], *, role: Callable[[M], str], window: int | None, fits: Callable[[list[M]], bool]
) -> RecentHistory[M]:
    """The newest turns of `history` that `window` (messages; None = any number) and `fits` allow.

    A turn is a user's message and what follows it up to the next one. It is kept whole or dropped, so that no answer is
    left without its question. Instructions at the beginning stay, and do not count in the window. `fits` gets the
    messages that would be kept; if more of them fit, fewer must fit too. It is not asked about instructions alone.
    """
    first = next((place for place, message in enumerate(history) if role(message) not in INSTRUCTIONS), len(history))
    starts = turn_starts(history, first, role)
    allowed = 0 if window is None else len(history) - window
    in_window = bisect.bisect_left(starts, allowed)  # the first of the turns that the window holds, of `starts`

    def fit_from(turn: int) -> bool:
        return turn == len(starts) or fits([*history[:first], *history[starts[turn] :]])

    kept = in_window
    if not fit_from(in_window):
        kept = bisect.bisect_left(range(len(starts)), True, lo=in_window + 1, key=fit_from)
    ends = [*starts, len(history)]
    return RecentHistory(
        messages=[*history[:first], *history[ends[kept] :]],
        turns_dropped=kept,
        over_window=ends[in_window] - first,
        over_length=ends[kept] - ends[in_window],
    )


def turn_starts(history: Sequence[M], first: int, role: Callable[[M], str]) -> list[int]:
    """Where each turn begins, from message `first` on. The first may begin with an answer: the caller sent no question."""
    return [place for place in range(first, len(history)) if place == first or role(history[place]) == "user"]
