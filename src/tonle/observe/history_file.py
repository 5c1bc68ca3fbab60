"""`HistoryFile`: the SQLite file of figures and usage, or its stand-in in memory.

Does: open, hold the file for this process alone, write in one transaction, move a damaged file aside. Does not: know more of its
contents than the tables, or ever fail: a server must not stop because its figures cannot be kept.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

log = logging.getLogger("tonle.observe")

ResultT = TypeVar("ResultT")

VERSION = 1  # of the tables and of `Sample`
_BUSY_S = 1.0  # another process holds the file
# Nothing is dropped for its age before the clock has run for so long without a jump: a machine that starts may have a clock that
# is years off until it has asked a time server.
STEADY_S = 600.0
_JUMP_S = 60.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS seconds (t INTEGER PRIMARY KEY, sample BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS minutes (t INTEGER PRIMARY KEY, sample BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS hours (t INTEGER PRIMARY KEY, sample BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS usage (
    day TEXT, key_id TEXT, model TEXT, key_name TEXT NOT NULL, requests INTEGER NOT NULL, failed INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, device_s REAL NOT NULL,
    cost REAL, audio_s REAL NOT NULL DEFAULT 0, characters INTEGER NOT NULL DEFAULT 0, images INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (day, key_id, model)
) WITHOUT ROWID;
"""

# Columns that came later, of tables that are kept: a file without them gets them, and goes on.
_LATER = {"usage": {"audio_s": "REAL NOT NULL DEFAULT 0", "characters": "INTEGER NOT NULL DEFAULT 0",
                    "images": "INTEGER NOT NULL DEFAULT 0"}}  # fmt: skip
_TABLES = {"seconds", "minutes", "hours", "usage"}


class Kept(Protocol):
    """What is written to the file from time to time."""

    def write(self, db: sqlite3.Connection, *, may_drop: bool) -> None:
        """Inside the transaction. `may_drop`: the clock can be trusted to say what is too old."""
        ...

    def written(self, ok: bool) -> None:
        """After it. False: what was written is to be written again."""
        ...


class _OtherVersionError(Exception):
    """The file was written by another version of Tonle."""


class HistoryFile:
    """Every method blocks: call them on a thread. `path` is None: in memory."""

    def __init__(
        self,
        path: Path | None,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self._clock, self._monotonic = clock, monotonic
        self._offset_s = clock() - monotonic()  # of the two clocks
        self._steady_since_s = monotonic()
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None
        self._complained = False

    @property
    def in_memory(self) -> bool:
        """Figures are lost with the process."""
        return self.path is None

    def open(self) -> None:
        with self._lock:
            self._open()

    def _open(self) -> sqlite3.Connection:
        if self._db is not None:
            return self._db
        if self.path is not None:
            try:
                self._db = self._open_or_replace(self.path)
                return self._db
            except (OSError, sqlite3.Error) as error:
                held = isinstance(error, sqlite3.OperationalError) and "locked" in str(error)
                reason = "another process uses it" if held else str(error)
                log.warning("%s cannot be used, so figures and usage are kept in memory: %s", self.path, reason)
                self.path = None
        self._db = _connected(":memory:")
        return self._db

    def _open_or_replace(self, path: Path) -> sqlite3.Connection:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600, exist_ok=True)
        try:
            return _connected(path)
        except sqlite3.OperationalError:
            raise  # it is held, or may not be read or written: nothing is known against what is in it
        except sqlite3.DatabaseError as error:
            aside = self._move_aside(path, f"damaged-{int(time.time())}")
            log.warning("%s is damaged (%s): it is now %s, and a new one begins", path, error, aside.name)
        except _OtherVersionError as error:
            aside = self._move_aside(path, f"version-{error}")
            log.warning("%s is of another version of Tonle: it is now %s, and a new one begins", path, aside.name)
        path.touch(mode=0o600, exist_ok=True)
        return _connected(path)

    def _move_aside(self, path: Path, suffix: str) -> Path:
        aside = path.with_name(f"{path.name}.{suffix}")
        path.replace(aside)
        for extra in ("-wal", "-shm"):  # they belong to it
            with contextlib.suppress(FileNotFoundError):
                path.with_name(path.name + extra).replace(aside.with_name(aside.name + extra))
        return aside

    def save(self, kept: Iterable[Kept]) -> bool:
        """All in one transaction; whether it was written. If not, the reason was logged."""
        kept = list(kept)
        with self._lock:
            ok = self._write(kept)
            for each in kept:
                each.written(ok)
        return ok

    def _write(self, kept: list[Kept]) -> bool:
        try:
            db, may_drop = self._open(), self._is_clock_steady()
            with _transaction(db):
                for each in kept:
                    each.write(db, may_drop=may_drop)
        except Exception as error:  # of SQLite, or a figure that no column can hold
            self._complain(error)
            if _is_damage(error):
                self._drop()  # the next time it is opened, found damaged, and moved aside
            return False
        self._complained = False
        return True

    def _is_clock_steady(self) -> bool:
        now_s = self._monotonic()
        offset_s = self._clock() - now_s
        if abs(offset_s - self._offset_s) > _JUMP_S:  # it was set, or the machine slept
            self._offset_s, self._steady_since_s = offset_s, now_s
        return now_s - self._steady_since_s >= STEADY_S

    def read(self, query: Callable[[sqlite3.Connection], ResultT], otherwise: ResultT) -> ResultT:
        """`otherwise`, if it cannot be read."""
        with self._lock:
            try:
                return query(self._open())
            except sqlite3.Error as error:
                self._complain(error)
                if _is_damage(error):
                    self._drop()
                return otherwise

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
            self._db = None

    def _complain(self, error: Exception) -> None:
        """Once, until it works again."""
        if not self._complained:
            self._complained = True
            log.warning("figures and usage cannot be kept in %s, trying again: %s", self.path or "memory", error)


def _is_damage(error: Exception) -> bool:
    return isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)


def _connected(path: Path | str) -> sqlite3.Connection:
    """Raises `sqlite3.Error`, `_OtherVersionError`."""
    db = sqlite3.connect(path, timeout=_BUSY_S, check_same_thread=False, isolation_level=None)
    try:
        _check_owner(db)
        db.execute("PRAGMA locking_mode=EXCLUSIVE")  # two servers would overwrite each other's seconds
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        with _transaction(db):
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version not in (0, VERSION):
                raise _OtherVersionError(str(version))
            (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            for statement in _SCHEMA.split(";"):
                db.execute(statement)
            _add_columns(db)
            db.execute(f"PRAGMA user_version={VERSION}")
    except BaseException:
        db.close()
        raise
    return db


def _add_columns(db: sqlite3.Connection) -> None:
    for table, columns in _LATER.items():
        there = {row[1] for row in db.execute(f"PRAGMA table_info({table})")}
        for name in columns.keys() - there:
            db.execute(f"ALTER TABLE {table} ADD COLUMN {name} {columns[name]}")


def _check_owner(db: sqlite3.Connection) -> None:
    """Before anything is changed in it. Raises `sqlite3.Error`: the settings may name the file of something else."""
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if tables and not tables >= _TABLES:
        raise sqlite3.OperationalError("it is a database with other tables, not one of figures")


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # SQLite may have rolled back by itself
            db.execute("ROLLBACK")
        raise
