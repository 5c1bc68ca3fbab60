"""`KeptResults`: requests by their id, so that a program may ask for a result later. The oldest that have ended go first."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from itertools import islice

from tonle.engine.request import GenerationResult
from tonle.errors import NotFound

MAX_KEPT = 10_000


class KeptResults:
    """From any thread."""

    def __init__(self) -> None:
        self._requests: dict[str, Future[GenerationResult]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request_id: str, future: Future[GenerationResult]) -> None:
        with self._lock:
            self._requests[request_id] = future
            too_many = len(self._requests) - MAX_KEPT
            if too_many > 0:
                done = (request_id for request_id, future in self._requests.items() if future.done())
                for request_id in list(islice(done, too_many)):
                    del self._requests[request_id]

    def wait(self, request_id: str, timeout_s: float | None) -> GenerationResult:
        """Raises `NotFound`, `TimeoutError`, or what ended the request."""
        future = self._requests.get(request_id)
        if future is None:
            raise NotFound(f"no request {request_id!r} is known here (results are kept for the last {MAX_KEPT})")
        try:
            return future.result(timeout_s)
        except TimeoutError:
            raise TimeoutError(f"request {request_id} has not ended after {timeout_s} s; it goes on") from None
