"""Keys and what they used today, in one SQLite file. Everything here blocks: call it on a thread.

Several processes may share the file: `tonle keys revoke` beside a running gateway, or gateways of one machine.
"""

from __future__ import annotations

import secrets
import sqlite3
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tonle.errors import ConfigError, NotFound
from tonle.gateway.keys.key import Key

_BUSY_S = 5.0  # another process is writing
_SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (id TEXT PRIMARY KEY, document BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS usage (key_id TEXT, day TEXT, tokens INTEGER NOT NULL, PRIMARY KEY (key_id, day));
CREATE TABLE IF NOT EXISTS secrets (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class KeyStore:
    """Owns the connection to the file."""

    def __init__(self, path: Path) -> None:
        """Creates the file, readable by its owner only. Raises `ConfigError`."""
        self.path = path
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=_BUSY_S, check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"cannot use {path} for keys: {error}", param="state_db") from error

    def add(self, key: Key) -> None:
        with self._lock:
            self._db.execute("INSERT INTO keys VALUES (?, ?)", (key.id, msgspec.json.encode(key)))

    def all(self) -> list[Key]:
        """Oldest first, revoked ones too."""
        with self._lock:
            found = self._db.execute("SELECT document FROM keys").fetchall()
        return sorted((msgspec.json.decode(document, type=Key) for (document,) in found), key=lambda key: key.created)

    def revoke(self, key_id: str) -> Key:
        """Raises `NotFound`. A key that is revoked already stays as it is."""
        key = next((each for each in self.all() if each.id == key_id), None)
        if key is None:
            raise NotFound(f"there is no key {key_id!r}; `tonle keys list` shows those there are")
        if key.revoked is None:
            key = msgspec.structs.replace(key, revoked=int(time.time()))
            with self._lock:
                self._db.execute("UPDATE keys SET document = ? WHERE id = ?", (msgspec.json.encode(key), key_id))
        return key

    def version(self) -> int:
        """Changes when another process has written."""
        with self._lock:
            return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    def add_usage(self, day: str, tokens: Mapping[str, int]) -> None:
        with self._lock:
            self._db.executemany(
                "INSERT INTO usage VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens",
                [(key_id, day, count) for key_id, count in tokens.items()],
            )

    def usage(self, day: str) -> dict[str, int]:
        with self._lock:
            return dict(self._db.execute("SELECT key_id, tokens FROM usage WHERE day = ?", (day,)).fetchall())

    def secret(self, name: str) -> str:
        """Drawn when it is first asked for, the same ever after."""
        with self._lock:
            self._db.execute("INSERT OR IGNORE INTO secrets VALUES (?, ?)", (name, secrets.token_hex(32)))
            return str(self._db.execute("SELECT value FROM secrets WHERE name = ?", (name,)).fetchone()[0])

    def close(self) -> None:
        with self._lock:
            self._db.close()
