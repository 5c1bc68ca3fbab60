"""`BackendFigures`: how each backend has answered so far, as counts that only grow.

Does: count requests, failures, first-token times and gaps per backend since this process began. Does not: know a time window:
whoever wants one reads twice and subtracts, as `tonle rollout` does with a canary.
"""

from __future__ import annotations

import msgspec

from tonle.observe.seen_request import SeenRequest
from tonle.observe.sketch import Sketch

MOST_BACKENDS = 4096  # backends come and go; the oldest names are forgotten first


class Figures(msgspec.Struct):
    """Of one backend. A request that failed there and was answered by another one counts for both."""

    requests: int = 0  # answered or failed; not those that were cancelled or refused
    failed: int = 0
    ttft: Sketch = msgspec.field(default_factory=Sketch)  # of answered requests, seconds
    itl: Sketch = msgspec.field(default_factory=Sketch)  # mean gap between the tokens of a request, seconds

    def since(self, before: Figures) -> Figures:
        """What was counted after `before`. Of a gateway that was restarted in between: all there is."""
        if self.requests < before.requests:
            return self
        return Figures(
            self.requests - before.requests,
            self.failed - before.failed,
            self.ttft.since(before.ttft),
            self.itl.since(before.itl),
        )

    def merge(self, other: Figures) -> None:
        self.requests += other.requests
        self.failed += other.failed
        self.ttft.merge(other.ttft)
        self.itl.merge(other.itl)


class BackendFigures:
    """For the thread of the event loop."""

    def __init__(self) -> None:
        self.by_name: dict[str, Figures] = {}

    def add(self, seen: SeenRequest) -> None:
        """A request has ended."""
        for name in seen.failed:
            if name != seen.backend:
                self._count_failure(name)
        backend, status = seen.backend, seen.status
        if not backend:
            return
        if status == "failed":
            self._count_failure(backend)
        elif status == "ok":
            figures = self._of(backend)
            figures.requests += 1
            if seen.ttft_s is not None:
                figures.ttft.add(seen.ttft_s)
            if (itl_s := seen.itl_s) is not None:
                figures.itl.add(itl_s)

    def _count_failure(self, name: str) -> None:
        figures = self._of(name)
        figures.requests += 1
        figures.failed += 1

    def _of(self, name: str) -> Figures:
        found = self.by_name.get(name)
        if found is None:
            if len(self.by_name) >= MOST_BACKENDS:
                del self.by_name[next(iter(self.by_name))]
            found = self.by_name[name] = Figures()
        return found
