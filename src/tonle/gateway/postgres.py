"""A PostgreSQL that several gateways share: its connections, the tables, and every failure as one error.

Does: connect, make the tables and functions once, run statements within a time. Does not: know what the statements mean
(`keys/postgres_keys.py`, `limits/postgres_book.py`).

Statements commit without waiting for the disk (`synchronous_commit = off`): a crash of the server may forget the last
fraction of a second of what was counted, never of what stands in `writing`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tonle.config.stores import place_of
from tonle.errors import ConfigError, StoreLost

MAX_CONNECTIONS = 8
SCHEMA_VERSION = 1
START_S = 20.0  # gateways that start together take turns with the tables
_SCHEMA_FILE = Path(__file__).with_name("postgres.sql")
_SCHEMA_LOCK = 7_462_041_975_113  # an arbitrary number of our own: one gateway at a time creates the tables


class Postgres:
    """Owns the pool. `open` it on the event loop that uses it."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """Raises `ConfigError`."""
        self.place = place_of(url)
        self._url = url
        self._timeout_s = timeout_s
        self._pool: Any = None
        try:
            import asyncpg
        except ImportError:
            raise ConfigError(
                f"state_db={self.place} needs the Python package asyncpg: pip install 'tonle[postgres]'",
                param="state_db",
            ) from None
        self._failures = (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError)

    async def open(self) -> None:
        """Raises `StoreLost`; `ConfigError` for tables of another version."""
        import asyncpg

        try:
            self._pool = await asyncpg.create_pool(
                self._url,
                min_size=0,  # a floor would be restored, and complained about, while the server is away
                max_size=MAX_CONNECTIONS,
                timeout=self._timeout_s,  # to connect
                server_settings={"application_name": "tonle", "synchronous_commit": "off"},
            )
        except self._failures as error:
            raise self._lost(error) from error
        except ValueError as error:
            raise ConfigError(f"state_db={self.place} cannot be used: {error}", param="state_db") from error
        async with self.writing(timeout_s=max(START_S, self._timeout_s)) as connection:
            await connection.execute("SELECT pg_advisory_xact_lock($1)", _SCHEMA_LOCK)
            if await connection.fetchval("SELECT to_regclass('tonle_schema')") is None:
                await connection.execute(_SCHEMA_FILE.read_text(encoding="utf-8"))
                await connection.execute("INSERT INTO tonle_schema VALUES ($1)", SCHEMA_VERSION)
            if await connection.fetchval("SELECT to_regclass('tonle_backends')") is None:  # of tables that are older
                await connection.execute("CREATE TABLE tonle_backends (name text PRIMARY KEY, document bytea NOT NULL)")
            version = await connection.fetchval("SELECT version FROM tonle_schema")
        if version != SCHEMA_VERSION:
            raise ConfigError(f"the tables in {self.place} are of version {version}, and this gateway needs "
                              f"{SCHEMA_VERSION}: run gateways of one version, or use another database",
                              param="state_db")  # fmt: skip

    async def fetch(self, statement: str, *values: Any) -> list[Any]:
        """One statement, one trip. Raises `StoreLost`."""
        async with self._connection(self._timeout_s) as connection:
            rows: list[Any] = await connection.fetch(statement, *values)
            return rows

    @contextlib.asynccontextmanager
    async def writing(self, *, timeout_s: float | None = None) -> AsyncIterator[Any]:
        """A connection in a transaction that is on disk when this ends. Raises `StoreLost`."""
        async with self._connection(timeout_s or self._timeout_s) as connection, connection.transaction():
            await connection.execute("SET LOCAL synchronous_commit = on")
            yield connection

    async def close(self) -> None:
        if self._pool is not None:
            self._pool.terminate()  # a server that hangs must not keep us from ending; nothing is under way by now

    @contextlib.asynccontextmanager
    async def _connection(self, timeout_s: float) -> AsyncIterator[Any]:
        try:
            async with asyncio.timeout(timeout_s), self._pool.acquire(timeout=timeout_s) as connection:
                yield connection
        except self._failures as error:
            raise self._lost(error) from error

    def _lost(self, error: BaseException) -> StoreLost:
        if isinstance(error, TimeoutError):
            return StoreLost(f"{self.place} did not answer within {self._timeout_s:g} s")
        return StoreLost(f"{self.place}: {str(error) or type(error).__name__}")
