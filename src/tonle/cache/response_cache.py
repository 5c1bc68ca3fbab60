"""`ResponseCache`: the cache in this process's memory. LRU with a TTL, bounded in entries and bytes."""

from __future__ import annotations

import functools
import time
from collections import OrderedDict
from collections.abc import Callable

from tonle.cache.cache_store import CachedResponse, CacheStats, Flight
from tonle.errors import ConfigError

MIB = 1024**2
MAX_SIZE = 1000  # entries
MAX_BYTES = 64 * MIB


class ResponseCache:
    """Owns the stored responses. Implements `Cache`."""

    def __init__(
        self,
        max_size: int = MAX_SIZE,
        ttl_seconds: float = 3600.0,
        *,
        max_bytes: int = MAX_BYTES,
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
        self._entries: OrderedDict[bytes, tuple[float, CachedResponse]] = OrderedDict()  # key -> (expires, response)
        self._flights: dict[bytes, Flight] = {}
        self._num_bytes = 0

    @property
    def num_entries(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def get(self, key: bytes) -> CachedResponse | None:
        """Counts as a hit or a miss."""
        found = self._entries.get(key)
        if found is not None and found[0] <= self._clock():
            self._drop(key)
            found = None
        if found is None:
            self.stats.misses += 1
            return None
        self._entries.move_to_end(key)
        self.stats.hits += 1
        return found[1]

    def put(self, key: bytes, response: CachedResponse) -> None:
        """A response larger than a tenth of `max_bytes` is not stored: it would evict too many others."""
        size = len(response.body)
        if size * 10 > self.max_bytes:
            return
        self._drop(key)
        self._entries[key] = (self._clock() + self.ttl_seconds, response)
        self._num_bytes += size
        while len(self._entries) > self.max_size or self._num_bytes > self.max_bytes:
            self._drop(next(iter(self._entries)))

    def is_computing(self, key: bytes) -> bool:
        """Whether `find` would wait for an identical request."""
        return key in self._flights

    async def find(self, key: bytes) -> CachedResponse | Flight:
        """A stored response, perhaps after waiting for an identical request; or a flight: compute, then land it."""
        found = self.get(key)
        while found is None:
            flight = self._flights.get(key)
            if flight is None:
                flight = self._flights[key] = Flight(functools.partial(self._end_flight, key))
                return flight
            found = await flight.wait()
            if found is not None:
                self._count_shared()
        return found

    async def clear(self) -> int:
        """Returns the number of entries removed. Requests in progress continue and are stored when they end."""
        count = len(self._entries)
        self._entries.clear()
        self._num_bytes = 0
        return count

    async def close(self) -> None:
        """Nothing to do."""

    def _end_flight(self, key: bytes, response: CachedResponse | None) -> None:
        self._flights.pop(key, None)
        if response is not None:
            self.put(key, response)

    def _count_shared(self) -> None:
        """A request that missed was answered by an identical one: a hit after all."""
        self.stats.misses -= 1
        self.stats.hits += 1
        self.stats.shared += 1

    def _drop(self, key: bytes) -> None:
        found = self._entries.pop(key, None)
        if found is not None:
            self._num_bytes -= len(found[1].body)
