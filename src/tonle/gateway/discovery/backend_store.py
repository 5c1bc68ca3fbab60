"""`BackendStore`: the backends that admins added while a gateway ran, kept over restarts. In SQLite, PostgreSQL and Redis.

Does: keep rows by name. Does not: know which of them are in use. A row may hold an `api_key`: the store is as secret as that.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import msgspec

from tonle.cache.redis_client import RedisClient
from tonle.config.gateway import backend_name
from tonle.config.routing import BackendConfig

if TYPE_CHECKING:
    from tonle.gateway.postgres import Postgres

log = logging.getLogger("tonle.gateway")

REDIS_KEY = "tonle:backends"  # hash: name -> row as JSON


class BackendStore(Protocol):
    """Those on a server raise `StoreLost` while it cannot be reached."""

    place: str  # for messages: without passwords

    async def all_backends(self) -> list[BackendConfig]: ...
    async def put_backend(self, row: BackendConfig) -> None: ...
    async def delete_backend(self, name: str) -> None: ...


def encode(row: BackendConfig) -> bytes:
    return msgspec.json.encode(row)


def rows_of(documents: list[bytes]) -> list[BackendConfig]:
    """In an order that does not depend on the store. What a newer version may have written is left out."""
    rows = []
    for document in documents:
        try:
            rows.append(msgspec.json.decode(document, type=BackendConfig))
        except msgspec.MsgspecError as error:
            log.warning("a backend in the state store cannot be read, and is left out: %s", error)
    return sorted(rows, key=backend_name)


class RedisBackends:
    def __init__(self, client: RedisClient) -> None:
        self.place = client.place
        self._client = client

    async def all_backends(self) -> list[BackendConfig]:
        async with self._client.trip() as redis:
            return rows_of(await redis.hvals(REDIS_KEY))

    async def put_backend(self, row: BackendConfig) -> None:
        async with self._client.trip() as redis:
            await redis.hset(REDIS_KEY, backend_name(row), encode(row))

    async def delete_backend(self, name: str) -> None:
        async with self._client.trip() as redis:
            await redis.hdel(REDIS_KEY, name)


class PostgresBackends:
    """Owns `tonle_backends`, which `gateway/postgres.py` makes."""

    def __init__(self, server: Postgres) -> None:
        self.place = server.place
        self._server = server

    async def all_backends(self) -> list[BackendConfig]:
        return rows_of([row[0] for row in await self._server.fetch("SELECT document FROM tonle_backends")])

    async def put_backend(self, row: BackendConfig) -> None:
        async with self._server.writing() as connection:
            await connection.execute(
                "INSERT INTO tonle_backends VALUES ($1, $2) ON CONFLICT (name) DO UPDATE SET document = excluded.document",
                backend_name(row), encode(row),
            )  # fmt: skip

    async def delete_backend(self, name: str) -> None:
        async with self._server.writing() as connection:
            await connection.execute("DELETE FROM tonle_backends WHERE name = $1", name)
