"""Stop strings in a growing text: has one appeared, and how much of the end could still become one?

Does: search. Does not: hold the text; `stream.py` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class StopMatch(NamedTuple):
    start: int
    end: int
    stop: str


class StopStrings:
    """The stop strings of one request. Empty strings are ignored."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._longest_open = max(map(len, self._stops), default=1) - 1  # all of a stop string would be a match

    def find(self, text: str) -> StopMatch | None:
        """The match that is complete first; of two that end together, the longer.

        Judging by the end rather than the start makes the answer independent of how the text arrives: a match is final
        the moment its last character is there, and nothing later can take it back.
        """
        best: StopMatch | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < (best.end, best.start)):
                best = StopMatch(start, start + len(stop), stop)
        return best

    def open_length(self, text: str) -> int:
        """Length of the longest end of `text` that some stop string begins with: what must not be shown yet."""
        first = max(0, len(text) - self._longest_open)
        if self._firsts.isdisjoint(text[first:]):  # most of the time
            return 0
        for start in range(first, len(text)):
            if text[start] in self._firsts:
                end = text[start:]
                if any(stop.startswith(end) for stop in self._stops):
                    return len(end)
        return 0
