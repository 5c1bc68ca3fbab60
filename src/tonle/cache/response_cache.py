"""`ResponseCache`: least recently used out first, everything out after a while, one computation per name at a time."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from tonle.errors import ConfigError

MIB = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedResponse:
    """A whole answer as its bytes. A stream is kept as the events it was."""

    body: bytes
    content_type: str
    stream: bool
    request_id: str  # of the request it was computed for
    usage_tokens: int = 0


@dataclass(slots=True)
class CacheStats:
    hits: int = 0
    misses: int = 0
    shared: int = 0  # hits that waited for an identical request
    evictions: int = 0
    expirations: int = 0

    @property
    def hit_rate(self) -> float:
        """0 before the first lookup."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0


class Flight:
    """An answer being computed. Its leader lands it, with the answer or with None if there is nothing to share."""

    def __init__(self, cache: ResponseCache, name: bytes) -> None:
        self._cache = cache
        self._name = name
        self._landed: asyncio.Future[CachedResponse | None] = asyncio.get_running_loop().create_future()

    def land(self, response: CachedResponse | None) -> None:
        """Wakes everybody who waits. Idempotent: the first call counts."""
        if not self._landed.done():
            self._landed.set_result(response)
            self._cache.end_flight(self._name, response)

    async def wait(self) -> CachedResponse | None:
        """None: the leader had no answer to share; try on your own."""
        return await asyncio.shield(self._landed)


class ResponseCache:
    """Owns the answers. The seed of `max_size` and `ttl_seconds` is in the names operators know."""

    def __init__(
        self,
        max_size: int = 1000,
        ttl_seconds: float = 3600.0,
        *,
        max_bytes: int = 64 * MIB,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises `ConfigError`."""
        for name, value in (("max_size", max_size), ("ttl_seconds", ttl_seconds), ("max_bytes", max_bytes)):
            if value <= 0:
                raise ConfigError(f"{name} must be more than 0, not {value}", param=name)
        self.max_size = max_size
        self.ttl_seconds = ttl_seconds
        self.max_bytes = max_bytes
        self.stats = CacheStats()
        self._clock = clock
        self._entries: OrderedDict[bytes, tuple[float, CachedResponse]] = OrderedDict()  # name -> (expires, answer)
        self._flights: dict[bytes, Flight] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def get(self, name: bytes) -> CachedResponse | None:
        """Counts as a hit or a miss."""
        found = self._entries.get(name)
        if found is not None and found[0] <= self._clock():
            self._drop(name)
            self.stats.expirations += 1
            found = None
        if found is None:
            self.stats.misses += 1
            return None
        self._entries.move_to_end(name)
        self.stats.hits += 1
        return found[1]

    def put(self, name: bytes, response: CachedResponse) -> None:
        """An answer larger than a tenth of the memory is not kept: it would push out too many others."""
        size = len(response.body)
        if size * 10 > self.max_bytes:
            return
        self._drop(name)
        self._entries[name] = (self._clock() + self.ttl_seconds, response)
        self._num_bytes += size
        while len(self._entries) > self.max_size or self._num_bytes > self.max_bytes:
            self._drop(next(iter(self._entries)))
            self.stats.evictions += 1

    def clear(self) -> int:
        """Returns how many answers were dropped. Computations under way go on, and are kept when they end."""
        count = len(self._entries)
        self._entries.clear()
        self._num_bytes = 0
        return count

    # -- identical requests that run together

    def flight(self, name: bytes) -> Flight | None:
        """The computation of `name` that is under way."""
        return self._flights.get(name)

    def lead(self, name: bytes) -> Flight:
        assert name not in self._flights, "one leader at a time"
        self._flights[name] = Flight(self, name)
        return self._flights[name]

    def end_flight(self, name: bytes, response: CachedResponse | None) -> None:
        self._flights.pop(name, None)
        if response is not None:
            self.put(name, response)

    def count_shared(self) -> None:
        """A request that missed was answered by another's computation: a hit after all."""
        self.stats.misses -= 1
        self.stats.hits += 1
        self.stats.shared += 1

    def _drop(self, name: bytes) -> None:
        found = self._entries.pop(name, None)
        if found is not None:
            self._num_bytes -= len(found[1].body)
