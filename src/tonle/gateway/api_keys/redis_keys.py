"""Keys in Redis, for several gateways.

    tonle:keys           hash: id -> key as JSON, without its secret
    tonle:keys:version   how often that hash was changed
    tonle:secret:NAME    drawn once

Redis must write to disk (`appendonly yes`) and must not evict, or keys are lost with it; `state.py` warns.
"""

from __future__ import annotations

import secrets

import msgspec

from tonle.cache.redis_client import RedisClient
from tonle.gateway.api_keys.key import Key
from tonle.gateway.api_keys.key_store import in_order, revoked

KEYS, VERSION, SECRET = "tonle:keys", "tonle:keys:version", "tonle:secret:"


class RedisKeys:
    """Owns those names; the client is shared with the limits."""

    def __init__(self, client: RedisClient) -> None:
        self.place = client.place
        self._client = client

    async def add(self, key: Key) -> None:
        await self._write(key)

    async def all(self) -> list[Key]:
        async with self._client.trip() as redis:
            return in_order(await redis.hvals(KEYS))

    async def revoke(self, key_id: str) -> Key:
        async with self._client.trip() as redis:
            document = await redis.hget(KEYS, key_id)
        key = revoked(document, key_id)
        await self._write(key)
        return key

    async def version(self) -> int:
        async with self._client.trip() as redis:
            return int(await redis.get(VERSION) or 0)

    async def secret(self, name: str) -> str:
        async with self._client.trip() as redis:
            await redis.set(SECRET + name, secrets.token_hex(32), nx=True)
            found: bytes = await redis.get(SECRET + name)
            return found.decode()

    async def _write(self, key: Key) -> None:
        async with self._client.trip() as redis, redis.pipeline(transaction=True) as pipe:
            pipe.hset(KEYS, key.id, msgspec.json.encode(key))
            pipe.incr(VERSION)
            await pipe.execute()
