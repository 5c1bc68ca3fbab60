"""What the two caches have in common: the stored response, the protocol, the counters, and the single flight.

Does: types. Does not: store anything (`ResponseCache` does in memory, `RedisCache` in Redis).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedResponse:
    """A complete response body. A stream is stored as its events."""

    body: bytes
    content_type: str
    stream: bool
    request_id: str  # of the request it was computed for
    adapter: str = ""  # that had a part in it: NAME@sha256:DIGEST


class Flight:
    """A response being computed: identical requests wait for it instead of computing it again.

    The request that got the flight from `find` must `land` it, with the response or with None if there is none to share.
    """

    def __init__(self, on_landed: Callable[[CachedResponse | None], None]) -> None:
        self._on_landed = on_landed
        self._landed: asyncio.Future[CachedResponse | None] = asyncio.get_running_loop().create_future()

    def land(self, response: CachedResponse | None) -> None:
        """Wakes all requests that wait. Only the first call counts."""
        if not self._landed.done():
            self._landed.set_result(response)
            self._on_landed(response)

    async def wait(self) -> CachedResponse | None:
        """None: there was no response to share; look again, and compute it if it is still missing."""
        return await asyncio.shield(self._landed)


@dataclass(slots=True)
class CacheStats:
    hits: int = 0
    misses: int = 0
    shared: int = 0  # hits that waited for an identical request
    errors: int = 0  # calls to a cache server that failed: a miss, or a response that was not stored

    @property
    def hit_rate(self) -> float:
        """0 before the first lookup."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else 0.0


class Cache(Protocol):
    """One per gateway; used on one event loop."""

    stats: CacheStats

    @property
    def num_entries(self) -> int | None:
        """None: not known here; ask the cache server."""

    @property
    def num_bytes(self) -> int | None: ...

    async def find(self, key: bytes) -> CachedResponse | Flight:
        """A stored response, perhaps after waiting for an identical request; or a flight: compute, then land it."""

    async def clear(self) -> int:
        """Returns the number of entries removed. Requests in progress continue and are stored when they end."""

    async def close(self) -> None:
        """Finishes pending writes first."""
