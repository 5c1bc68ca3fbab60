"""`RedisTier`: blocks in a Redis that several engines share, on this machine or another.

Redis bounds its own memory: set `maxmemory` and `maxmemory-policy allkeys-lru` there. Blocks that nobody asked for in a day
leave by themselves. A Redis that cannot be reached is left alone for a while: prompts are computed as if there were none.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from tonle.config.stores import place_of
from tonle.engine.kv.tiers.stored_block import HEADER_BYTES, header_of, is_whole
from tonle.engine.kv.tiers.tier import TierCounts
from tonle.errors import ConfigError

log = logging.getLogger("tonle.engine")

_PREFIX = b"tonle:kv:"
_KEPT_S = 24 * 3600
_TIMEOUT_S = 2.0  # for an answer
_PAUSE_S = 10.0  # after it could not be reached


class RedisTier:
    name = "redis"

    def __init__(self, url: str) -> None:
        try:
            import redis
        except ImportError:
            raise ConfigError(
                "kv_offload_redis needs the package redis: pip install 'tonle[redis]'", param="kv_offload_redis"
            ) from None
        self.counts = TierCounts()
        self._where = place_of(url)
        self._error: type[Exception] = redis.RedisError
        self._paused_until_s = 0.0
        self._redis: Any = redis.Redis.from_url(
            url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S, protocol=2, health_check_interval=30
        )

    def load(self, key: bytes, out: memoryview) -> bool:
        if (found := self._ask("getex", _PREFIX + key, ex=_KEPT_S)) is None:
            return False
        data = memoryview(found)[HEADER_BYTES:]
        if len(data) != len(out) or not is_whole(bytes(found[:HEADER_BYTES]), key, data):
            self.counts.damaged += 1
            self._ask("delete", _PREFIX + key)
            return False
        out[:] = data
        return True

    def save(self, key: bytes, data: memoryview) -> None:
        if not self._ask("exists", _PREFIX + key):
            self._ask("set", _PREFIX + key, header_of(key, data) + bytes(data), ex=_KEPT_S)

    def close(self) -> None:
        self._redis.close()

    def _ask(self, command: str, *args: Any, **options: Any) -> Any:
        """None as well if it cannot be reached."""
        if time.monotonic() < self._paused_until_s:
            return None
        try:
            return getattr(self._redis, command)(*args, **options)
        except (self._error, OSError) as error:
            self.counts.errors += 1
            self._paused_until_s = time.monotonic() + _PAUSE_S
            log.warning("%s has no KV blocks for now: %s", self._where, error)
            return None
