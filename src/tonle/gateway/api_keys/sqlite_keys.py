"""Keys, what they used today, and backends that admins added, in one SQLite file.

Several processes may share the file: `tonle keys revoke` beside a running gateway, or gateways of one machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from tonle.config.gateway import backend_name
from tonle.config.routing import BackendConfig
from tonle.errors import ConfigError
from tonle.gateway.api_keys.key import Key
from tonle.gateway.api_keys.key_store import in_order, revoked
from tonle.gateway.discovery.backend_store import encode, rows_of

ResultT = TypeVar("ResultT")

_BUSY_S = 5.0  # another process is writing
_SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (id TEXT PRIMARY KEY, document BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS usage (key_id TEXT, day TEXT, tokens INTEGER NOT NULL, PRIMARY KEY (key_id, day));
CREATE TABLE IF NOT EXISTS backends (name TEXT PRIMARY KEY, document BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS secrets (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class SqliteKeys:
    """Owns the connection to the file. SQLite blocks, so every call works on a thread."""

    def __init__(self, path: Path) -> None:
        """Creates the file, readable by its owner only. Raises `ConfigError`."""
        self.place = str(path)
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=_BUSY_S, check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"cannot use {path} for keys: {error}", param="state_db") from error

    async def add(self, key: Key) -> None:
        document = msgspec.json.encode(key)
        await self._on_thread(lambda db: db.execute("INSERT INTO keys VALUES (?, ?)", (key.id, document)))

    async def all(self) -> list[Key]:
        found = await self._on_thread(lambda db: db.execute("SELECT document FROM keys").fetchall())
        return in_order([document for (document,) in found])

    async def revoke(self, key_id: str) -> Key:
        def work(db: sqlite3.Connection) -> Key:
            with _writing(db):
                row = db.execute("SELECT document FROM keys WHERE id = ?", (key_id,)).fetchone()
                key = revoked(row[0] if row else None, key_id)
                db.execute("UPDATE keys SET document = ? WHERE id = ?", (msgspec.json.encode(key), key_id))
            return key

        return await self._on_thread(work)

    async def version(self) -> int:
        return await self._on_thread(lambda db: int(db.execute("PRAGMA data_version").fetchone()[0]))

    async def secret(self, name: str) -> str:
        def work(db: sqlite3.Connection) -> str:
            db.execute("INSERT OR IGNORE INTO secrets VALUES (?, ?)", (name, secrets.token_hex(32)))
            return str(db.execute("SELECT value FROM secrets WHERE name = ?", (name,)).fetchone()[0])

        return await self._on_thread(work)

    # -- backends (`BackendStore`)

    async def all_backends(self) -> list[BackendConfig]:
        found = await self._on_thread(lambda db: db.execute("SELECT document FROM backends").fetchall())
        return rows_of([document for (document,) in found])

    async def put_backend(self, row: BackendConfig) -> None:
        values = (backend_name(row), encode(row))
        await self._on_thread(lambda db: db.execute("INSERT OR REPLACE INTO backends VALUES (?, ?)", values).close())

    async def delete_backend(self, name: str) -> None:
        await self._on_thread(lambda db: db.execute("DELETE FROM backends WHERE name = ?", (name,)).close())

    # -- what keys used, for limits that are counted in memory

    async def add_usage(self, day: str, tokens: Mapping[str, int]) -> None:
        rows = [(key_id, day, count) for key_id, count in tokens.items()]
        await self._on_thread(lambda db: db.executemany(
            "INSERT INTO usage VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens", rows
        ).close())  # fmt: skip

    async def usage(self, day: str) -> dict[str, int]:
        rows = await self._on_thread(
            lambda db: db.execute("SELECT key_id, tokens FROM usage WHERE day = ?", (day,)).fetchall()
        )
        return dict(rows)

    async def close(self) -> None:
        await self._on_thread(lambda db: db.close())

    async def _on_thread(self, work: Callable[[sqlite3.Connection], ResultT]) -> ResultT:
        """`work` returns no cursor: its end, on whatever thread, would disturb the statement of who has the lock then."""

        def locked() -> ResultT:
            with self._lock:
                return work(self._db)

        return await asyncio.to_thread(locked)


@contextlib.contextmanager
def _writing(db: sqlite3.Connection) -> Iterator[None]:
    """One transaction: what is read in it stays true until it is written."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")
