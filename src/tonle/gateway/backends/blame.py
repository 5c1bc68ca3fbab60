"""`Blame`: which backends failed on one request, and whether they or the request are at fault.

Does: tell breakers how each backend fared with the request. Does not: count failures in a row (`breaker.py`), or retry.

A backend that cannot be reached is at fault. One that failed after it was sent the request is, unless a second backend
fails on the same request or refuses it: then the request is at fault, and no failure counts.
"""

from __future__ import annotations

from tonle.gateway.backends.backend import Backend

_BUSY = 429  # says nothing about the request


class Blame:
    """One per request."""

    __slots__ = ("_caller", "_counted", "_refused", "failed")

    def __init__(self, caller: str) -> None:
        """`caller`: whose requests these are; keys of one tenant are one caller."""
        self._caller = caller
        self._counted: Backend | None = None  # its failure counts, as far as is known
        self._refused = False  # by a backend, as the caller's error
        self.failed: list[Backend] = []  # were sent the request and failed

    def unreachable(self, backend: Backend) -> None:
        """It was not sent the request."""
        backend.num_failed += 1
        backend.breaker.fail()

    def fail(self, backend: Backend) -> None:
        """It was sent the request, and did not answer it."""
        backend.num_failed += 1
        if self.failed or self._refused:
            self._forgive()
            backend.breaker.abandon()
        else:
            self._counted = backend
            backend.breaker.fail(self._caller)
        self.failed.append(backend)

    def answer(self, backend: Backend, status: int) -> None:
        """It answered, and was not at fault."""
        if status < 300:
            backend.breaker.succeed()
            return
        backend.breaker.abandon()  # an error of the caller, or a full queue: neither shows that it can answer
        if 400 <= status < 500 and status != _BUSY:
            self._refused = True
            self._forgive()

    def _forgive(self) -> None:
        if self._counted is not None:
            self._counted.breaker.forgive(self._caller)
            self._counted = None
