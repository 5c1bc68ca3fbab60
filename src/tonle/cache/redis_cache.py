"""`RedisCache`: answers in a Redis that several gateways share. LRU and TTL as in memory; no trip to it ever fails a caller.

Does: look up, keep, count, bound. Does not: share computations between gateways (within one, identical requests are
computed once), or touch keys of Redis that do not begin with `PREFIX`.

    tonle:cache:a:DIGEST   one answer, which Redis drops after its time
    tonle:cache:used       sorted set: `DIGEST:SIZE` by the time of its last use
    tonle:cache:bytes      the sum of those sizes

A Redis that is away is a miss, and is left alone for a moment, so that requests do not wait for it one by one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from tonle.cache.answers import CacheStats
from tonle.cache.flight import CachedResponse, Flight
from tonle.cache.redis_client import RedisClient
from tonle.errors import StoreLost

log = logging.getLogger("tonle.cache")

PREFIX = "tonle:cache:"
PAUSE_S = 1.0  # after a failed trip
SCAN_COUNT = 1000  # keys Redis looks at per step of a scan

_NOW = "local t = redis.call('TIME'); local now = t[1] + t[2] / 1e6\n"

# KEYS: the answer, used. ARGV: its digest.
_GET = (
    _NOW
    + """
local found = redis.call('GET', KEYS[1])
if found then redis.call('ZADD', KEYS[2], 'XX', string.format('%.6f', now), ARGV[1] .. ':' .. #found) end
return found
"""
)

# KEYS: the answer, used, bytes. ARGV: digest, answer, ttl in ms, most answers, most bytes, prefix of answers.
# What was last used longer ago than the TTL has been dropped by Redis: the sweep only takes it off the books.
_PUT = (
    _NOW
    + """
local digest, answer, ttl_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
local max_size, max_bytes = tonumber(ARGV[4]), tonumber(ARGV[5])
if redis.call('EXISTS', KEYS[2]) == 0 then redis.call('DEL', KEYS[3]) end
local function strike(members)
  local freed = 0
  for _, member in ipairs(members) do freed = freed + tonumber(string.match(member, ':(%d+)$')) end
  if #members > 0 then redis.call('ZREM', KEYS[2], unpack(members)) end
  return redis.call('DECRBY', KEYS[3], freed)
end
local before = redis.call('STRLEN', KEYS[1])
if before > 0 and redis.call('ZSCORE', KEYS[2], digest .. ':' .. before) then strike({digest .. ':' .. before}) end
local stale
repeat
  stale = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', string.format('%.6f', now - ttl_ms / 1000), 'LIMIT', 0, 500)
  strike(stale)
until #stale == 0
redis.call('SET', KEYS[1], answer, 'PX', ttl_ms)
if redis.call('ZADD', KEYS[2], string.format('%.6f', now), digest .. ':' .. #answer) == 1 then
  redis.call('INCRBY', KEYS[3], #answer)
end
local evicted = 0
while redis.call('ZCARD', KEYS[2]) > max_size or tonumber(redis.call('GET', KEYS[3])) > max_bytes do
  local oldest = redis.call('ZRANGE', KEYS[2], 0, 0)
  if #oldest == 0 then break end
  redis.call('DEL', ARGV[6] .. string.match(oldest[1], '^%x+'))
  strike(oldest)
  evicted = evicted + 1
end
for _, key in ipairs({KEYS[2], KEYS[3]}) do redis.call('PEXPIRE', key, 2 * ttl_ms) end
return {evicted, redis.call('ZCARD', KEYS[2]), tonumber(redis.call('GET', KEYS[3]) or 0)}
"""
)


class RedisCache:
    """Owns the answers under `PREFIX`, together with every other gateway that uses them."""

    def __init__(
        self,
        client: RedisClient,
        max_size: int,
        ttl_seconds: float,
        *,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats = CacheStats()
        self.num_entries = 0  # as of this gateway's last write
        self.num_bytes = 0
        self._client = client
        self._max_size = max_size
        self._max_bytes = max_bytes
        self._ttl_ms = max(1, round(ttl_seconds * 1000))
        self._clock = clock
        self._get = client.redis.register_script(_GET)
        self._put = client.redis.register_script(_PUT)
        self._flights: dict[bytes, Flight] = {}
        self._keeping: set[asyncio.Task[None]] = set()
        self._away_until_s = 0.0
        self._is_away = False

    async def find(self, name: bytes) -> CachedResponse | Flight:
        """An answer, perhaps after a wait for an identical request; or a flight: the caller must compute, and land it.

        A flight begins before Redis is asked, so that identical requests also share the question.
        """
        while (flight := self._flights.get(name)) is not None:
            found = await flight.wait()
            if found is not None:
                self.stats.hits += 1
                self.stats.shared += 1
                return found
        found = None
        flight = self._flights[name] = Flight(lambda response: self._land(name, response, known=found))
        try:
            found = await self._look_up(name)
        except BaseException:
            flight.land(None)
            raise
        if found is None:
            self.stats.misses += 1
            return flight
        self.stats.hits += 1
        flight.land(found)
        return found

    async def forget_all(self) -> int:
        """The books first: what is kept meanwhile is then entered in new ones."""
        dropped = 0
        try:
            async with self._client.trip() as redis:
                await redis.delete(f"{PREFIX}used", f"{PREFIX}bytes")
            cursor = 0
            while True:
                async with self._client.trip() as redis:
                    cursor, keys = await redis.scan(cursor, match=f"{PREFIX}a:*", count=SCAN_COUNT)
                    dropped += await redis.unlink(*keys) if keys else 0
                if not cursor:
                    break
            self.num_entries = self.num_bytes = 0
        except StoreLost as lost:
            self._note_lost(lost)
        return dropped

    async def close(self) -> None:
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await self._client.close()

    def _land(self, name: bytes, response: CachedResponse | None, *, known: CachedResponse | None) -> None:
        """Until Redis has the answer, the flight stays: whoever asks meanwhile finds it there."""
        if response is None or response is known or self._clock() < self._away_until_s:
            self._flights.pop(name, None)
            return
        task = asyncio.get_running_loop().create_task(self._keep(name, response))
        self._keeping.add(task)
        task.add_done_callback(self._keeping.discard)

    async def _look_up(self, name: bytes) -> CachedResponse | None:
        if self._clock() < self._away_until_s:
            return None
        digest = name.hex()
        try:
            async with self._client.trip():
                found = await self._get(keys=[f"{PREFIX}a:{digest}", f"{PREFIX}used"], args=[digest])
            self._note_back()
        except StoreLost as lost:
            self._note_lost(lost)
            return None
        try:
            return None if found is None else msgspec.msgpack.decode(found, type=CachedResponse)
        except msgspec.MsgspecError:
            return None  # written by another version of ours

    async def _keep(self, name: bytes, response: CachedResponse) -> None:
        digest, answer = name.hex(), msgspec.msgpack.encode(response)
        try:
            if len(answer) * 10 > self._max_bytes:
                return  # as in memory: it would push out too many others
            keys = [f"{PREFIX}a:{digest}", f"{PREFIX}used", f"{PREFIX}bytes"]
            args = [digest, answer, self._ttl_ms, self._max_size, self._max_bytes, f"{PREFIX}a:"]
            async with self._client.trip():
                evicted, self.num_entries, self.num_bytes = await self._put(keys=keys, args=args)
            self.stats.evictions += evicted
            self._note_back()
        except StoreLost as lost:
            self._note_lost(lost)
        finally:
            self._flights.pop(name, None)

    def _note_lost(self, lost: StoreLost) -> None:
        self.stats.errors += 1
        self._away_until_s = self._clock() + PAUSE_S
        if not self._is_away:
            self._is_away = True
            log.error("the response cache is out of reach, so everything is a miss: %s", lost)

    def _note_back(self) -> None:
        if self._is_away:
            self._is_away = False
            log.warning("the response cache in %s is back", self._client.place)
