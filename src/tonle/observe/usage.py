"""`Usage`: what each key used of each model, by day (UTC).

Does: add up ended requests, keep 400 days in the file of the history. Does not: limit anything (`gateway/limits`).

An answer from the response cache counts as a request; its tokens do not, because none were computed.
"""

from __future__ import annotations

import datetime
import sqlite3
import threading

import msgspec

from tonle.observe.history_file import HistoryFile
from tonle.observe.seen_request import SeenRequest

KEPT_DAYS = 400
_DAY_S = 86_400
_SUMS = (
    "requests",
    "failed",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "device_s",
    "audio_s",
    "characters",
    "images",
)
_COLUMNS = ("day", "key_id", "model", "key_name", *_SUMS, "cost")
_UPSERT = f"""
INSERT INTO usage ({", ".join(_COLUMNS)}) VALUES ({", ".join("?" * len(_COLUMNS))}) ON CONFLICT DO UPDATE SET
    key_name = excluded.key_name, {", ".join(f"{name} = {name} + excluded.{name}" for name in _SUMS)},
    cost = CASE WHEN cost IS NULL THEN excluded.cost ELSE cost + coalesce(excluded.cost, 0) END
"""
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM usage WHERE day >= ? AND day <= ?"

Place = tuple[str, str, str]  # day, key id, model


class UsageRow(msgspec.Struct, kw_only=True):
    day: str  # 2026-01-31, UTC
    key_id: str
    key_name: str
    model: str  # as it was asked for; empty: the request was refused before that was known
    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts, found in a prefix cache
    completion_tokens: int = 0
    device_s: float = 0.0  # of a device, by share
    audio_s: float = 0.0  # of sound, heard or spoken
    characters: int = 0  # that were spoken
    images: int = 0  # that were made
    cost: float | None = None  # in the currency of price_per_hour; None: no price was set

    def merge(self, other: UsageRow) -> None:
        self.key_name = other.key_name
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.cost is not None:
            self.cost = other.cost + (self.cost or 0.0)


class Usage:
    """`add` may be called on the event loop; the others read and write the file: call them on a thread."""

    def __init__(self, file: HistoryFile) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._unsaved: dict[Place, UsageRow] = {}
        self._saving: dict[Place, UsageRow] = {}
        self._day = (-1, "")  # number and name of the day of the latest request

    def add(self, seen: SeenRequest) -> None:
        day = self._day_of(seen.arrived)
        model = seen.model if seen.accepted_s is not None else ""  # else a caller could fill the file with names
        place = (day, seen.key_id, model)
        with self._lock:
            row = self._unsaved.get(place)
            if row is None:
                row = self._unsaved[place] = UsageRow(day=day, key_id=seen.key_id, key_name="", model=model)
            row.key_name = seen.key_name
            row.requests += 1
            row.failed += seen.status in ("failed", "interrupted")
            if seen.status == "cached":
                return
            row.prompt_tokens += seen.prompt_tokens
            row.cached_tokens += seen.cached_tokens
            row.completion_tokens += seen.completion_tokens
            row.device_s += seen.device_s
            row.audio_s += seen.audio_s
            row.characters += seen.characters
            row.images += seen.images
            if seen.cost is not None:
                row.cost = seen.cost + (row.cost or 0.0)

    def _day_of(self, unix_s: float) -> str:
        number = int(unix_s // _DAY_S)
        if self._day[0] != number:
            self._day = (number, _day_name(number))
        return self._day[1]

    def rows(self, start_day: str, end_day: str) -> list[UsageRow]:
        """Both days included, as 2026-01-31; by day, key and model."""

        def read(db: sqlite3.Connection) -> dict[Place, UsageRow]:
            """The lock of the file is held: what is being saved is either in it or in `_unsaved`."""
            found = {(row[0], row[1], row[2]): _row(row) for row in db.execute(_SELECT, (start_day, end_day))}
            self._add_unsaved(found, start_day, end_day)
            return found

        found = self._file.read(read, None)
        if found is None:
            found = {}
            self._add_unsaved(found, start_day, end_day)
        return [found[place] for place in sorted(found)]

    def _add_unsaved(self, found: dict[Place, UsageRow], start_day: str, end_day: str) -> None:
        with self._lock:
            for place, row in self._unsaved.items():
                if start_day <= row.day <= end_day:
                    if place in found:
                        found[place].merge(row)
                    else:
                        found[place] = msgspec.structs.replace(row)

    # -- `Kept`

    def write(self, db: sqlite3.Connection, *, may_drop: bool) -> None:
        with self._lock:
            self._saving, self._unsaved = self._unsaved, {}
        db.executemany(_UPSERT, [tuple(getattr(row, name) for name in _COLUMNS) for row in self._saving.values()])
        if self._saving and may_drop:
            newest = max(day for day, _, _ in self._saving)
            oldest = datetime.date.fromisoformat(newest) - datetime.timedelta(days=KEPT_DAYS)
            db.execute("DELETE FROM usage WHERE day <= ?", (oldest.isoformat(),))

    def written(self, ok: bool) -> None:
        with self._lock:
            if not ok:
                for place, row in self._unsaved.items():
                    if place in self._saving:
                        self._saving[place].merge(row)
                    else:
                        self._saving[place] = row
                self._unsaved = self._saving
            self._saving = {}


def _day_name(number: int) -> str:
    return (datetime.date(1970, 1, 1) + datetime.timedelta(days=number)).isoformat()


def _row(values: tuple[object, ...]) -> UsageRow:
    return msgspec.convert(dict(zip(_COLUMNS, values, strict=True)), UsageRow)
