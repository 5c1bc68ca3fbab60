"""`Clock`: virtual time, and what is to happen in it.

Does: call each function at its time, in order; let replicas run between. Does not: know what the functions do.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Protocol

_Event = tuple[float, int, Callable[[], None]]


class Runs(Protocol):
    """Has something to do at `next_s`; None: it waits for others."""

    @property
    def next_s(self) -> float | None: ...
    def advance(self) -> None: ...


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[_Event] = []
        self._numbers = itertools.count()  # events of one moment happen in the order in which they were asked for

    def seconds(self) -> float:
        """For gates and breakers, which take 0 for "never"."""
        return self.now + 1.0

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        assert time_s >= self.now, "time runs forwards"
        heapq.heappush(self._events, (time_s, next(self._numbers), call))

    def schedule(self, replica: Runs) -> None:
        """To be called whenever its `next_s` may have become earlier."""
        if (next_s := replica.next_s) is not None:
            self.at(next_s, lambda: self._advance(replica, next_s))

    def _advance(self, replica: Runs, asked_s: float) -> None:
        """Goes on with it as long as nothing else is earlier."""
        if replica.next_s != asked_s:
            return  # it has been asked for a second time, and gone on
        events = self._events
        replica.advance()
        while (next_s := replica.next_s) is not None and (not events or next_s < events[0][0]):
            self.now = next_s
            replica.advance()
        self.schedule(replica)

    def run(self, is_over: Callable[[], bool]) -> None:
        events = self._events
        while events and not is_over():
            self.now, _, call = heapq.heappop(events)
            call()
