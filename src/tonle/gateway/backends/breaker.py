"""`Breaker`: pause a backend that failed several times in a row, then try it with one request."""

from __future__ import annotations

import time
from collections.abc import Callable


class Breaker:
    """closed: requests are sent · open: failed too often, none is sent · half open: one is sent, and decides."""

    def __init__(self, *, max_failures: int, pause_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_failures = max_failures
        self._pause_s = pause_s
        self._clock = clock
        self._failures = 0  # in a row
        self._opened_s: float | None = None
        self._trying = False

    @property
    def state(self) -> str:
        if self._opened_s is None:
            return "closed"
        return "half open" if self._clock() - self._opened_s >= self._pause_s else "open"

    @property
    def allows(self) -> bool:
        state = self.state
        return state == "closed" or (state == "half open" and not self._trying)

    @property
    def retry_after_s(self) -> float:
        return 0.0 if self._opened_s is None else max(0.0, self._opened_s + self._pause_s - self._clock())

    def begin(self) -> None:
        """A request is on its way."""
        self._trying = self._opened_s is not None

    def succeed(self) -> None:
        self._failures = 0
        self._opened_s = None
        self._trying = False

    def fail(self) -> None:
        self._failures += 1
        self._trying = False
        if self._failures >= self._max_failures or self._opened_s is not None:
            self._opened_s = self._clock()

    def abandon(self) -> None:
        """The request ended without saying anything about the backend: its caller left."""
        self._trying = False
