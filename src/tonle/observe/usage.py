"""`Usage`: what each key used of each model, by day (UTC).

Does: add up ended requests, keep 400 days in the file of the history. Does not: limit anything (`gateway/limits`).

An answer from the response cache counts as a request; its tokens do not, because none were computed.
"""

from __future__ import annotations

import datetime
import sqlite3
import threading
from collections.abc import Iterable, Sequence

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
    """`count` may be called on the event loop; the others read and write the file: call them on a thread."""

    def __init__(self, file: HistoryFile) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._unsaved: dict[Place, UsageRow] = {}
        self._saving: dict[Place, UsageRow] = {}

    def count(self, requests: Sequence[SeenRequest]) -> None:
        """Requests have ended. All are counted, or none of them, where it fails."""
        by_place: dict[tuple[float, str, str], list[SeenRequest]] = {}  # a day is a number here
        for seen in requests:
            if not seen.is_admitted:  # nobody's usage
                continue
            model = seen.model if seen.accepted_s is not None else ""  # else a caller could fill the file with names
            place = (seen.arrived // _DAY_S, seen.key_id, model)
            if (same := by_place.get(place)) is None:
                by_place[place] = [seen]
            else:
                same.append(seen)
        rows = [_row_of(_day_name(int(day)), same, model) for (day, _, model), same in by_place.items()]
        with self._lock:
            _merge(self._unsaved, [((row.day, row.key_id, row.model), row) for row in rows])

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
                _merge(self._saving, self._unsaved.items())
                self._unsaved = self._saving
            self._saving = {}


def _merge(rows: dict[Place, UsageRow], added: Iterable[tuple[Place, UsageRow]]) -> None:
    for place, row in added:
        if (known := rows.setdefault(place, row)) is not row:
            known.merge(row)


def _row_of(day: str, requests: list[SeenRequest], model: str) -> UsageRow:
    """Of one key. A list for each sum is the cheapest loop there is."""
    statuses = [seen.status for seen in requests]
    computed = [seen for seen in requests if seen.status != "cached"] if "cached" in statuses else requests
    media = [seen for seen in computed if seen.audio_s or seen.characters or seen.images]  # most have none
    costs = [cost for seen in computed if (cost := seen.cost) is not None]
    return UsageRow(
        day=day,
        key_id=requests[-1].key_id,
        key_name=requests[-1].key_name,
        model=model,
        requests=len(requests),
        failed=statuses.count("failed") + statuses.count("interrupted"),
        prompt_tokens=sum([seen.prompt_tokens for seen in computed]),
        cached_tokens=sum([seen.cached_tokens for seen in computed]),
        completion_tokens=sum([seen.completion_tokens for seen in computed]),
        device_s=sum([seen.device_s for seen in computed]),
        audio_s=sum([seen.audio_s for seen in media]),
        characters=sum([seen.characters for seen in media]),
        images=sum([seen.images for seen in media]),
        cost=sum(costs) if costs else None,
    )


def _day_name(number: int) -> str:
    return (datetime.date(1970, 1, 1) + datetime.timedelta(days=number)).isoformat()


def _row(values: tuple[object, ...]) -> UsageRow:
    return msgspec.convert(dict(zip(_COLUMNS, values, strict=True)), UsageRow)
