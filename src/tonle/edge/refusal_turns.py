"""`RefusalTurns`: requests that are refused by their head are answered one at a time, with a pause between them.

Does: keep a crowd of callers who are not wanted from filling a turn of the event loop, which those who are wanted share.
Does not: refuse, or drop any: each is answered, in order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

PAUSE_S = 0.002  # so at most 500 refusals per second


class RefusalTurns:
    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()  # at most one per connection
        self._pausing = False

    def take(self, start: Callable[[], None]) -> None:
        """Call `start` now, or after those who came before."""
        if self._pausing:
            self._waiting.append(start)
        else:
            self._start(start)

    def _start(self, start: Callable[[], None]) -> None:
        self._pausing = True
        asyncio.get_running_loop().call_later(PAUSE_S, self._next)
        start()

    def _next(self) -> None:
        self._pausing = False
        if self._waiting:
            self._start(self._waiting.popleft())
