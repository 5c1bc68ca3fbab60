"""`StateStore`: where a gateway keeps keys, and backends that were added, and counts limits.

A SQLite file for one gateway, a server for several.

Does: choose by the setting `state_db`, connect, close. Does not: import a server's library unless it is chosen.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

from tonle.cache.redis_client import RedisClient
from tonle.config.stores import POSTGRES, REDIS, scheme_of
from tonle.errors import ConfigError, StoreLost
from tonle.gateway.api_keys.key_store import KeyStore
from tonle.gateway.discovery.backend_store import BackendStore, PostgresBackends, RedisBackends
from tonle.gateway.limits.shared_counts import SharedCounts
from tonle.gateway.limits.usage_saver import UsageStore

log = logging.getLogger("tonle.gateway")


class StateStore(Protocol):
    """Limits are counted in `counts`, or else in memory; then `usage` stores them."""

    keys: KeyStore
    backends: BackendStore
    counts: SharedCounts | None
    usage: UsageStore | None

    async def open(self) -> None:
        """Raises `ConfigError` if it cannot be used: a gateway that knows no keys must not start."""

    async def close(self) -> None: ...


def state_of(place: str, *, timeout_s: float) -> StateStore:
    """Raises `ConfigError`."""
    scheme = scheme_of(place)
    if scheme in REDIS:
        return RedisState(place, timeout_s)
    if scheme in POSTGRES:
        return PostgresState(place, timeout_s)
    return FileState(Path(place))


class FileState:
    def __init__(self, path: Path) -> None:
        from tonle.gateway.api_keys.sqlite_keys import SqliteKeys

        self._file = SqliteKeys(path)
        self.keys: KeyStore = self._file
        self.backends: BackendStore = self._file
        self.counts: SharedCounts | None = None
        self.usage: UsageStore | None = self._file

    async def open(self) -> None:
        """It was, when it was made."""

    async def close(self) -> None:
        await self._file.close()


class RedisState:
    def __init__(self, url: str, timeout_s: float) -> None:
        from tonle.gateway.api_keys.redis_keys import RedisKeys
        from tonle.gateway.limits.redis_counts import RedisCounts

        self._client = RedisClient(url, timeout_s=timeout_s, param="state_db")
        self.keys: KeyStore = RedisKeys(self._client)
        self.backends: BackendStore = RedisBackends(self._client)
        self.counts: SharedCounts | None = RedisCounts(self._client)
        self.usage: UsageStore | None = None

    async def open(self) -> None:
        try:
            async with self._client.trip() as redis:
                facts = await redis.info()
        except StoreLost as error:
            raise _cannot_start(error) from error
        if facts.get("maxmemory") and facts.get("maxmemory_policy") != "noeviction":
            log.warning("%s may evict keys and limits when it is full (maxmemory-policy %s): set it to noeviction, and "
                        "keep the response cache elsewhere", self._client.place, facts["maxmemory_policy"])  # fmt: skip
        if not facts.get("aof_enabled"):
            log.warning("%s does not write every change to disk: keys may be lost with it. Set appendonly to yes",
                        self._client.place)  # fmt: skip

    async def close(self) -> None:
        await self._client.close()


class PostgresState:
    def __init__(self, url: str, timeout_s: float) -> None:
        from tonle.gateway.api_keys.postgres_keys import PostgresKeys
        from tonle.gateway.limits.postgres_counts import PostgresCounts
        from tonle.gateway.postgres import Postgres

        self._server = Postgres(url, timeout_s=timeout_s)
        self.keys: KeyStore = PostgresKeys(self._server)
        self.backends: BackendStore = PostgresBackends(self._server)
        self.counts: SharedCounts | None = PostgresCounts(self._server)
        self.usage: UsageStore | None = None

    async def open(self) -> None:
        try:
            await self._server.open()
        except StoreLost as error:
            raise _cannot_start(error) from error

    async def close(self) -> None:
        await self._server.close()


def _cannot_start(error: StoreLost) -> ConfigError:
    return ConfigError(f"cannot use state_db: {error}", param="state_db")
