"""`ResponseCache`: least recently used out first, everything out after a while, one computation per name at a time."""

from __future__ import annotations

import functools
import time
from collections import OrderedDict
from collections.abc import Callable

from tonle.cache.answers import CacheStats
from tonle.cache.flight import CachedResponse, Flight
from tonle.errors import ConfigError

MIB = 1024**2


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
    def num_entries(self) -> int:
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

    # -- as a gateway uses it (`Answers`)

    async def forget_all(self) -> int:
        return self.clear()

    async def close(self) -> None:
        """Memory needs no farewell."""

    async def find(self, name: bytes) -> CachedResponse | Flight:
        """An answer, perhaps after a wait for an identical request; or a flight: the caller must compute, and land it."""
        found = self.get(name)
        while found is None:
            flight = self._flights.get(name)
            if flight is None:
                return self.lead(name)
            found = await flight.wait()
            if found is not None:
                self._count_shared()
        return found

    # -- identical requests that run together

    def flight(self, name: bytes) -> Flight | None:
        """The computation of `name` that is under way."""
        return self._flights.get(name)

    def lead(self, name: bytes) -> Flight:
        assert name not in self._flights, "one leader at a time"
        self._flights[name] = Flight(functools.partial(self._end_flight, name))
        return self._flights[name]

    def _end_flight(self, name: bytes, response: CachedResponse | None) -> None:
        self._flights.pop(name, None)
        if response is not None:
            self.put(name, response)

    def _count_shared(self) -> None:
        """A request that missed was answered by another's computation: a hit after all."""
        self.stats.misses -= 1
        self.stats.hits += 1
        self.stats.shared += 1

    def _drop(self, name: bytes) -> None:
        found = self._entries.pop(name, None)
        if found is not None:
            self._num_bytes -= len(found[1].body)
