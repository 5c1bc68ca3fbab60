"""`Breaker`: pause a backend that failed several times in a row, then try it with one request.

Does: count failures, and remember whose requests they were. Does not: decide whether a failure was the backend's fault
(`blame.py`).

One caller's requests alone never pause a backend for others: they may be what it cannot take. It is paused for all once
requests of a second caller have failed too, or once it could not even be reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable

GATEWAY = ""  # in place of a caller: no request was at fault, the backend could not be reached


class Breaker:
    """closed: requests are sent · open: failed too often, none is sent · half open: one is sent, and decides."""

    def __init__(self, *, max_failures: int, pause_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_failures = max_failures
        self._pause_s = pause_s
        self._clock = clock
        self._failures: dict[str, int] = {}  # since the last success, by caller
        self._opened_s: float | None = None
        self._trying = False

    @property
    def state(self) -> str:
        if self._opened_s is None:
            return "closed"
        return "half open" if self._clock() - self._opened_s >= self._pause_s else "open"

    @property
    def allows(self) -> bool:
        """Not paused, or for one caller only."""
        return self._opened_s is None or not self._for_all or self._may_try

    def allows_for(self, caller: str) -> bool:
        """Not paused for all, nor for this caller."""
        if self._opened_s is None or self._may_try:
            return True
        return not self._for_all and caller not in self._failures

    @property
    def _for_all(self) -> bool:
        return len(self._failures) > 1 or GATEWAY in self._failures

    @property
    def _may_try(self) -> bool:
        return self.state == "half open" and not self._trying

    @property
    def retry_after_s(self) -> float:
        """Until it is tried again; 0 if it is not paused for all."""
        if self._opened_s is None or not self._for_all:
            return 0.0
        return max(0.0, self._opened_s + self._pause_s - self._clock())

    def begin(self) -> None:
        """A request is on its way."""
        self._trying = self._opened_s is not None

    def succeed(self) -> None:
        if self._failures:
            self._failures = {}
        self._opened_s = None
        self._trying = False

    def fail(self, caller: str = GATEWAY) -> None:
        """On a request of `caller`; without one, before any request was sent."""
        if self.state == "half open":  # the trial failed: paused again, for all once a second caller has failed too
            self._failures = {caller: self._max_failures}
        else:
            self._failures[caller] = self._failures.get(caller, 0) + 1
        self._trying = False
        if sum(self._failures.values()) >= self._max_failures:
            self._opened_s = self._clock()

    def forgive(self, caller: str) -> None:
        """A failure on a request of `caller` turned out to be the request's own."""
        if (left := self._failures.get(caller, 0) - 1) > 0:
            self._failures[caller] = left
        else:
            self._failures.pop(caller, None)
        if sum(self._failures.values()) < self._max_failures:
            self._opened_s = None

    def abandon(self) -> None:
        """The request ended without saying anything about the backend: its caller left."""
        self._trying = False
