"""`Index`: a SQLite file beside the trail that finds records fast. It holds nothing that the files do not.

Does: follow the ledgers from where it stopped (new records, redactions, removed days), search. Does not: count as
evidence; delete `index.sqlite` at any time and it is built again.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from tonle.audit import day_ledger, request_chains
from tonle.audit.day_ledger import LedgerLine
from tonle.audit.ledger_reader import texts_of
from tonle.audit.record_file import read_record
from tonle.audit.regular_file import OddFileError, kind_of
from tonle.errors import InternalError, InvalidRequest, NotFound

INDEX_NAME = "index.sqlite"
_SUFFIXES = ("", "-wal", "-shm", "-journal")  # files of one database
_VERSION = 3
_DIGEST_PREFIX = "sha256:"
_FIRST_DIGITS = re.compile(r"[0-9a-f]{8,64}")
_MAX_NUMBER = 2**63
_TRIGRAM = 3  # characters; shorter texts are searched without the text index

_SCHEMA = """
CREATE TABLE days (day TEXT PRIMARY KEY, size INTEGER NOT NULL);
CREATE TABLE records (
    rowid INTEGER PRIMARY KEY, day TEXT NOT NULL, file TEXT NOT NULL, seq INTEGER NOT NULL, id TEXT, request_id TEXT,
    response_id TEXT, time TEXT, key_id TEXT, model TEXT, adapter TEXT, adapter_digest TEXT, endpoint TEXT,
    status TEXT, http_status INTEGER, prompt_tokens INTEGER, completion_tokens INTEGER, total_ms REAL, chain_id TEXT,
    previous_id TEXT, content TEXT,
    UNIQUE (day, file)
);
CREATE INDEX by_time ON records (time);
CREATE INDEX by_id ON records (id);
CREATE INDEX by_request ON records (request_id);
CREATE INDEX by_response ON records (response_id);
CREATE INDEX by_chain ON records (chain_id);
"""
_TEXT_INDEX = (
    "CREATE VIRTUAL TABLE words USING fts5(content, content='records', content_rowid='rowid', tokenize='trigram')"
)
_INSERT = """
INSERT INTO records (day, file, seq, id, request_id, response_id, time, key_id, model, adapter, adapter_digest, endpoint,
    status, http_status, prompt_tokens, completion_tokens, total_ms, chain_id, previous_id, content)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """All given conditions hold. Times are UTC, ISO 8601, from `since` up to but without `until`."""

    since: str | None = None
    until: str | None = None
    key_id: str | None = None
    model: str | None = None
    adapter: str | None = None  # its name, or sha256: and the digest or at least 8 first digits of it
    status: str | None = None
    endpoint: str | None = None
    chain: str | None = None  # of requests that go on from each other: any id of any of them
    text: str | None = None  # contained in prompt, messages or output; case does not matter
    limit: int | None = 100
    newest_first: bool = False


class Row(msgspec.Struct, frozen=True):
    """One line of an answer: enough for a list. The record itself is in `day`/`file`."""

    day: str
    file: str
    seq: int
    id: str | None
    request_id: str | None
    response_id: str | None
    time: str | None
    key_id: str | None
    model: str | None
    adapter: str | None
    adapter_digest: str | None
    endpoint: str | None
    status: str | None
    http_status: int | None
    prompt_tokens: int | None
    completion_tokens: int | None
    total_ms: float | None
    chain_id: str | None  # that of the first record of its chain, also if the record does not say so
    previous_id: str | None  # of the record that it goes on from


_COLUMNS = ", ".join(Row.__struct_fields__)


class Index:
    """Use as a context manager. Opening it brings it up to date."""

    def __init__(self, directory: Path, *, rebuild: bool = False) -> None:
        self._directory = directory
        self._path = directory / INDEX_NAME
        if not _days_in(directory):
            raise NotFound(f"there is no audit trail in {directory}")
        self._check_place()
        try:
            self._database = self._connect(rebuild=rebuild)
            self.num_added = self.update()
        except sqlite3.DatabaseError as error:
            raise InternalError(f"{self._path}: {error}; `tonle audit reindex` builds it again") from error

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *exc: object) -> None:
        self._database.close()

    def _check_place(self) -> None:
        """Not through a link into another database, and not into a FIFO. Raises `InternalError`."""
        for suffix in _SUFFIXES:
            path = self._path.with_name(INDEX_NAME + suffix)
            with contextlib.suppress(FileNotFoundError):
                mode = path.lstat().st_mode
                if not stat.S_ISREG(mode):
                    raise InternalError(f"{path} is {kind_of(mode)}, not the search index; remove it")

    def _connect(self, *, rebuild: bool) -> sqlite3.Connection:
        if rebuild:
            for suffix in _SUFFIXES:
                self._path.with_name(INDEX_NAME + suffix).unlink(missing_ok=True)
        database = sqlite3.connect(self._path, timeout=30)
        database.execute("PRAGMA secure_delete = ON")  # what is redacted leaves the file
        if database.execute("PRAGMA user_version").fetchone()[0] != _VERSION:
            database.close()
            self._path.unlink(missing_ok=True)
            database = sqlite3.connect(self._path, timeout=30)
            database.execute("PRAGMA secure_delete = ON")
            database.executescript(_SCHEMA + request_chains.SCHEMA)
            with contextlib.suppress(sqlite3.OperationalError):  # built without FTS5: searching is slower, no more
                database.execute(_TEXT_INDEX)
            database.execute(f"PRAGMA user_version = {_VERSION}")
            database.commit()
            self._path.chmod(0o600)  # it holds the words of every record
        self._has_words = bool(database.execute("SELECT 1 FROM sqlite_master WHERE name = 'words'").fetchone())
        return database

    # -- following the ledgers

    def update(self) -> int:
        """Read what the ledgers have more than last time; returns how many records are new."""
        num_before = self._database.total_changes
        seen = dict(self._database.execute("SELECT day, size FROM days").fetchall())
        num_added = 0
        days = _days_in(self._directory)
        with self._database:
            for day in set(seen) - set(days):
                self._remove("day = ?", [day])
                self._database.execute("DELETE FROM days WHERE day = ?", [day])
            for day in days:
                num_added += self._follow(day, seen.get(day, 0))
            if self._has_words and self._database.total_changes - num_before > num_added * 2 + len(days):
                self._database.execute("INSERT INTO words (words) VALUES ('optimize')")  # drops words of removed rows
        return num_added

    def _follow(self, day: str, size: int) -> int:
        """A line or a record that cannot be read is passed over: `verify` says what is wrong with it."""
        num_added, end = 0, size
        with contextlib.suppress(FileNotFoundError, OddFileError):
            for text in texts_of(self._directory / day / day_ledger.LEDGER_NAME, start=size, with_unfinished=False):
                end += len(text) + 1
                with contextlib.suppress(ValueError):
                    num_added += self._take(day, day_ledger.decode_line(text))
        if end > size:
            self._database.execute("INSERT OR REPLACE INTO days VALUES (?, ?)", [day, end])
        return num_added

    def _take(self, day: str, line: LedgerLine) -> bool:
        """Whether it is a new record."""
        if line.kind == "record" and day_ledger.is_file_name(line.file):
            return self._add(day, line)
        if line.kind == "redacted" and day_ledger.is_day(str(line.day)) and day_ledger.is_file_name(line.file):
            self._remove("day = ? AND file = ?", [line.day, line.file])
            self._add(str(line.day), line)
        return False

    def _add(self, day: str, line: LedgerLine) -> bool:
        try:
            record = read_record(self._directory / day / str(line.file))
            content = _content(record)
        except (OSError, ValueError, RecursionError):
            return False
        usage, latency = record.get("usage") or {}, record.get("latency_ms") or {}
        names = (
            "id",
            "request_id",
            "response_id",
            "time",
            "key_id",
            "model",
            "adapter",
            "adapter_digest",
            "endpoint",
            "status",
        )
        values = [
            day, line.file, _number(record["chain"].get("seq")) or 0, *(_text(record.get(name)) for name in names),
            _number(record.get("http_status")), _number(usage.get("prompt_tokens")),
            _number(usage.get("completion_tokens")), _number(latency.get("total")),
        ]  # fmt: skip
        self._remove("day = ? AND file = ?", [day, line.file])
        values += [*request_chains.place_of(self._database, record), content]
        cursor = self._database.execute(_INSERT, values)
        request_chains.add_calls(self._database, cursor.lastrowid, record)
        if self._has_words:
            self._database.execute("INSERT INTO words (rowid, content) VALUES (?, ?)", [cursor.lastrowid, values[-1]])
        return True

    def _remove(self, condition: str, values: Sequence[Any]) -> None:
        request_chains.remove_calls(self._database, condition, values)
        if self._has_words:
            self._database.execute(
                "INSERT INTO words (words, rowid, content) "
                f"SELECT 'delete', rowid, content FROM records WHERE {condition}",
                values,
            )
        self._database.execute(f"DELETE FROM records WHERE {condition}", values)

    # -- searching

    def find(self, query: Query) -> Iterator[Row]:
        conditions, values = self._conditions(query)
        order = "DESC" if query.newest_first else "ASC"
        statement = (
            f"SELECT {_COLUMNS} FROM records WHERE {' AND '.join(conditions)} ORDER BY time {order}, rowid {order}"
        )
        if query.limit is not None:
            statement += f" LIMIT {int(query.limit)}"
        for row in self._database.execute(statement, values):
            if day_ledger.is_day(str(row[0])) and day_ledger.is_file_name(str(row[1])):  # never a way out of the trail
                yield Row(*row)

    def _conditions(self, query: Query) -> tuple[list[str], list[Any]]:
        conditions, values = ["1"], []
        for field in fields(query):
            value = getattr(query, field.name)
            if value is None or field.name in ("limit", "newest_first", "text"):
                continue
            if field.name == "adapter" and value.startswith(_DIGEST_PREFIX):
                conditions.append("adapter_digest GLOB ?")
                values.append(f"{_first_digits(value)}*")
                continue
            if field.name == "chain":
                conditions.append("chain_id IN (SELECT value FROM json_each(?))")
                values.append(msgspec.json.encode(request_chains.chain_ids(self._database, value)).decode())
                continue
            operator = {"since": "time >= ?", "until": "time < ?"}.get(field.name, f"{field.name} = ?")
            conditions.append(operator)
            values.append(value)
        if query.text:
            if self._has_words and len(query.text) >= _TRIGRAM and "\0" not in query.text:  # where FTS5's strings end
                conditions.append("rowid IN (SELECT rowid FROM words WHERE words MATCH ?)")
                values.append('"' + query.text.replace('"', '""') + '"')
            else:
                conditions.append("instr(lower(content), lower(?)) > 0")
                values.append(query.text)
        return conditions, values

    def locate(self, name: str) -> Path:
        """The file of a record, by its short id, request id, response id or file name. Raises if it is not one."""
        if not name:
            raise InvalidRequest("which record? Give its id")
        rows = self.named(name)
        if not rows:
            raise NotFound(f"no record has the id {name!r}")
        if len(rows) > 1:
            files = ", ".join(f"{row.day}/{row.file}" for row in rows)
            raise InvalidRequest(f"{name!r} is the id of several records; give a file name: {files}")
        return self._directory / rows[0].day / rows[0].file

    def named(self, name: str, limit: int = 10, *, until: str | None = None) -> list[Row]:
        """The newest records with this short id, request id, response id or file name, up to a time. Callers may use an id
        twice."""
        rows = self._database.execute(
            f"SELECT {_COLUMNS} FROM records WHERE (id = :it OR request_id = :it OR response_id = :it OR file = :it)"
            " AND (:until IS NULL OR time <= :until) ORDER BY time DESC, rowid DESC LIMIT :limit",
            {"it": Path(name).name, "limit": limit, "until": until},
        ).fetchall()
        for day, file, *_ in rows:
            if not day_ledger.is_day(str(day)) or not day_ledger.is_file_name(str(file)):
                raise InternalError(
                    f"{self._path} names a file outside the trail; `tonle audit reindex` builds it again"
                )
        return [Row(*row) for row in rows]

    def count(self) -> int:
        return int(self._database.execute("SELECT count(*) FROM records").fetchone()[0])


def query_time(text: str | None) -> str | None:
    """A time that a person wrote, as records write it, so that comparing texts compares times. Raises `InvalidRequest`."""
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):  # the latter: in UTC it would be before the year 1, or after 9999
        raise InvalidRequest(f"{text!r} is not a time; write it as 2025-01-31 or 2025-01-31T09:30:00") from None
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _content(record: dict[str, Any]) -> str:
    """Everything people said and were told, once each."""
    pieces = [
        record.get(name) for name in ("system_prompt", "user_input", "messages", "prompt", "output", "choices", "error")
    ]
    seen: dict[str, None] = {}
    for piece in pieces:
        for text in _strings(piece):
            seen.setdefault(text)
    return "\n".join(seen)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            if name not in ("role", "type"):
                yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else msgspec.json.encode(value).decode()


def _number(value: Any) -> int | float | None:
    """What SQLite can hold, if it is a number at all."""
    return value if isinstance(value, int | float) and abs(value) < _MAX_NUMBER else None


def _days_in(directory: Path) -> list[str]:
    try:
        return day_ledger.days_in(directory)
    except OSError as error:
        raise InternalError(f"{directory}: {error.strerror or error}") from error


def _first_digits(adapter: str) -> str:
    """Of sha256:DIGEST, whole or shortened. Raises `InvalidRequest`."""
    digits = adapter.removeprefix(_DIGEST_PREFIX).lower()
    if not _FIRST_DIGITS.fullmatch(digits):
        raise InvalidRequest(
            f"after {_DIGEST_PREFIX} an adapter needs at least 8 hexadecimal digits of its digest, and at most all 64; "
            f"got {digits[:80]!r}",
            param="adapter",
        )
    return digits
