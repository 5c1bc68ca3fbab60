"""`RedisResponses`: stored responses in a Redis that several gateways or front ends share.

Does: read and write them, each with a TTL that begins again when it is used. Does not: bound their number or bytes (Redis
does, by its `maxmemory` and `maxmemory-policy`), or touch Redis keys that do not begin with `PREFIX`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from tonle.cache.redis_client import RedisClient
from tonle.errors import TooLarge
from tonle.gateway.apis.responses.response_store import Items, StoredResponse

PREFIX = "tonle:responses:"
MAX_ENTRY_BYTES = 8 * 1024**2  # moving a larger one would hold up other requests to Redis
_FIELDS = ("response", "input", "output", "links")


class _Links(msgspec.Struct):
    chain: tuple[str, ...]
    context_bytes: int


class RedisResponses:
    """Owns the keys under `PREFIX`, together with all others that use this Redis. Implements `ResponseStore`."""

    def __init__(self, client: RedisClient, ttl_s: float) -> None:
        self._client = client
        self._ttl_ms = max(1, round(ttl_s * 1000))

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        ((response, given, output, links),) = await self._read(owner, [response_id], _FIELDS)
        if response is None or given is None or output is None or links is None:
            return None
        try:
            found = msgspec.msgpack.decode(links, type=_Links)
        except msgspec.MsgspecError:
            return None  # written by another version of Tonle
        return StoredResponse(response, given, output, found.chain, found.context_bytes)

    async def get_items(self, owner: str, response_ids: Sequence[str]) -> list[Items | None]:
        found = await self._read(owner, response_ids, ("input", "output"))
        return [None if given is None or output is None else Items(given, output) for given, output in found]

    async def _read(self, owner: str, response_ids: Sequence[str], fields: tuple[str, ...]) -> list[list[bytes | None]]:
        async with self._client.trip() as redis:
            pipe = redis.pipeline(transaction=False)
            for response_id in response_ids:
                key = _key(owner, response_id)
                pipe.hmget(key, fields)
                pipe.pexpire(key, self._ttl_ms)
            found: list[list[bytes | None]] = (await pipe.execute())[::2]
        return found

    async def put(self, owner: str, response_id: str, stored: StoredResponse) -> None:
        if stored.num_bytes > MAX_ENTRY_BYTES:
            raise TooLarge(f"it has {stored.num_bytes} bytes; at most {MAX_ENTRY_BYTES} are stored in Redis")
        links = msgspec.msgpack.encode(_Links(stored.chain, stored.context_bytes))
        texts = (stored.response, stored.input, stored.output, links)
        key = _key(owner, response_id)
        async with self._client.trip() as redis:
            pipe = redis.pipeline(transaction=True)  # never without its TTL
            pipe.hset(key, mapping=dict(zip(_FIELDS, texts, strict=True)))
            pipe.pexpire(key, self._ttl_ms)
            await pipe.execute()

    async def delete(self, owner: str, response_id: str) -> bool:
        async with self._client.trip() as redis:
            return bool(await redis.unlink(_key(owner, response_id)))

    async def close(self) -> None:
        await self._client.close()


def _key(owner: str, response_id: str) -> str:
    """A hash, because an owner's name may be anything."""
    return PREFIX + hashlib.sha256(f"{len(owner)}:{owner}{response_id}".encode("utf-8", "surrogatepass")).hexdigest()
