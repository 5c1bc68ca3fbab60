"""`RedisCache`: the cache in a Redis that several gateways share. A Redis that fails never fails a request.

Does: GET, SET with a TTL, and clear. Does not: evict (Redis does, by its `maxmemory` and `maxmemory-policy`), count entries,
share computations between gateways (within one gateway, identical requests are computed once), or touch Redis keys that do
not begin with `PREFIX`.

After a lookup that failed, Redis is not asked for `PAUSE_S`, so that requests do not wait for it one by one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from tonle.cache.cache_store import CachedResponse, CacheStats, Flight
from tonle.cache.redis_client import RedisClient
from tonle.errors import StoreLost

log = logging.getLogger("tonle.cache")

PREFIX = "tonle:cache:"
MAX_ENTRY_BYTES = 8 * 1024**2  # a larger response is not stored: moving it would hold up other requests to Redis
PAUSE_S = 1.0
LOG_EVERY_S = 60.0
SCAN_COUNT = 1000  # keys Redis looks at per step of a scan


class RedisCache:
    """Owns the keys under `PREFIX`, together with all other gateways that use this Redis. Implements `Cache`."""

    def __init__(self, client: RedisClient, ttl_seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.stats = CacheStats()
        self.num_entries = None  # counting them would take a scan
        self.num_bytes = None
        self._client = client
        self._ttl_ms = max(1, round(ttl_seconds * 1000))
        self._clock = clock
        self._flights: dict[bytes, Flight] = {}
        self._writes: set[asyncio.Task[None]] = set()
        self._paused_until_s = 0.0
        self._quiet_until_s = 0.0

    async def find(self, key: bytes) -> CachedResponse | Flight:
        """A stored response, perhaps after waiting for an identical request; or a flight: compute, then land it.

        The flight begins before Redis is asked, so that identical requests also share the lookup.
        """
        while (flight := self._flights.get(key)) is not None:
            found = await flight.wait()
            if found is not None:
                self.stats.hits += 1
                self.stats.shared += 1
                return found
        found = None
        flight = self._flights[key] = Flight(lambda response: self._landed(key, response, stored=found))
        try:
            found = await self._get(key)
        except BaseException:
            flight.land(None)
            raise
        if found is None:
            self.stats.misses += 1
            return flight
        self.stats.hits += 1
        flight.land(found)
        return found

    async def clear(self) -> int:
        removed = cursor = 0
        try:
            while True:
                async with self._client.trip() as redis:
                    cursor, keys = await redis.scan(cursor, match=f"{PREFIX}*", count=SCAN_COUNT)
                    removed += await redis.unlink(*keys) if keys else 0
                if not cursor:
                    break
        except StoreLost as lost:
            self._note_error(lost)
        return removed

    async def close(self) -> None:
        await asyncio.gather(*self._writes, return_exceptions=True)
        await self._client.close()

    def _landed(self, key: bytes, response: CachedResponse | None, *, stored: CachedResponse | None) -> None:
        """The flight stays until Redis has the response, so that requests that come meanwhile find it there."""
        if response is None or response is stored or self._clock() < self._paused_until_s:
            self._flights.pop(key, None)
            return
        task = asyncio.get_running_loop().create_task(self._set(key, response))
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    async def _get(self, key: bytes) -> CachedResponse | None:
        if self._clock() < self._paused_until_s:
            return None
        try:
            async with self._client.trip() as redis:
                found = await redis.get(PREFIX + key.hex())
        except StoreLost as lost:
            self._paused_until_s = self._clock() + PAUSE_S
            self._note_error(lost)
            return None
        try:
            return None if found is None else msgspec.msgpack.decode(found, type=CachedResponse)
        except msgspec.MsgspecError:
            return None  # written by another version of Tonle

    async def _set(self, key: bytes, response: CachedResponse) -> None:
        try:
            if len(response.body) <= MAX_ENTRY_BYTES:
                async with self._client.trip() as redis:
                    await redis.set(PREFIX + key.hex(), msgspec.msgpack.encode(response), px=self._ttl_ms)
        except StoreLost as lost:
            self._note_error(lost)
        finally:
            self._flights.pop(key, None)

    def _note_error(self, lost: StoreLost) -> None:
        self.stats.errors += 1
        if self._clock() >= self._quiet_until_s:
            self._quiet_until_s = self._clock() + LOG_EVERY_S
            log.error("the response cache failed, so requests are computed: %s", lost)
