"""`History`: figures of the past, in rings: an hour of seconds, a month of minutes, a month of hours.

Does: take a sample each second, add it up into minutes and hours, give series for charts. Does not: decide when it is saved
(`observed.py`), or take samples (`sampler.py`).

A second in which nothing happened is a row of zeros; one in which the server did not run has no row, and is null in a series.
"""

from __future__ import annotations

import math
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tonle.observe.history_file import HistoryFile
from tonle.observe.sample import NAMES, Sample

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Sample)
_EARLY_S = 60  # a row that is further in the future was written under a wrong clock


class _Ring:
    """Samples of `step` seconds each, `most` of them. Hours are there because a month of minutes takes long to read."""

    def __init__(self, table: str, step: int, most: int) -> None:
        self.table, self.step, self.most = table, step, most
        self.unsaved: dict[int, Sample] = {}  # by t; of minutes and hours, the newest is not complete yet
        self.open_t: int | None = None  # of the newest
        self._closed: list[int] = []  # of those that are being saved, the complete ones

    @property
    def length_s(self) -> int:
        return self.step * self.most

    def add(self, sample: Sample) -> None:
        t = sample.t - sample.t % self.step
        if self.step > 1 and self.open_t is not None and 0 < self.open_t - t <= self.step:
            t = (
                self.open_t
            )  # the clock was set back: a complete row, which may be in the file already, is not begun again
        self.open_t = t
        known = self.unsaved.get(t)
        if known is None:
            while len(self.unsaved) >= self.most:  # the file cannot be written
                del self.unsaved[next(iter(self.unsaved))]
            if self.step == 1:
                self.unsaved[t] = sample
                return
            known = self.unsaved[t] = Sample(t, seconds=0)
        known.merge(sample)
        known.t, known.seconds = t, min(known.seconds, self.step)  # a second may be that of an end and of a new start

    def encoded(self) -> dict[int, bytes]:
        return {t: _ENCODER.encode(sample) for t, sample in self.unsaved.items()}

    def begin_save(self) -> dict[int, bytes]:
        """What to write. Complete are those that no second is added to after this moment."""
        self._closed = [t for t in self.unsaved if t != self.open_t or self.step == 1]
        return self.encoded()

    def write(self, db: sqlite3.Connection, rows: dict[int, bytes], *, may_drop: bool) -> None:
        db.executemany(f"INSERT OR REPLACE INTO {self.table} VALUES (?, ?)", rows.items())
        if self.open_t is not None and may_drop:
            bounds = (self.open_t - self.length_s, self.open_t + _EARLY_S)
            db.execute(f"DELETE FROM {self.table} WHERE t <= ? OR t > ?", bounds)

    def written(self) -> None:
        for t in self._closed:
            self.unsaved.pop(t, None)

    def rows(self, db: sqlite3.Connection, start: int, end: int) -> dict[int, bytes]:
        query = f"SELECT t, sample FROM {self.table} WHERE t >= ? AND t < ? ORDER BY t"
        return dict(db.execute(query, (start, end)).fetchall())

    def resume(self, db: sqlite3.Connection, now: int) -> None:
        """Go on with the second, minute and hour in which the last process may have ended."""
        t = now - now % self.step
        for found, data in self.rows(db, t, t + 1).items():
            if (sample := _decoded(data)) is not None:
                self.unsaved[found], self.open_t = sample, found


class History:
    """`add` may be called on the event loop, beside the others on a thread: those read and write the file."""

    def __init__(
        self,
        path: Path | None,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        most: tuple[int, int, int] = (3600, 44_640, 744),
    ) -> None:
        """`path` is None: in memory. The file is opened by `open`, or when it is first needed. `most`: of the rings."""
        self.file = HistoryFile(path, clock=clock, monotonic=monotonic)
        self._clock = clock  # unix seconds
        self._lock = threading.Lock()
        self._rings = (_Ring("seconds", 1, most[0]), _Ring("minutes", 60, most[1]), _Ring("hours", 3600, most[2]))
        self._newest: int | None = None

    @property
    def kind(self) -> str:
        return "memory" if self.file.in_memory else "file"

    def open(self) -> None:
        """Once, before samples are added."""
        self.file.open()

        def resume(db: sqlite3.Connection) -> None:
            now = int(self._clock())
            for ring in self._rings:
                ring.resume(db, now)
            self._newest = self._rings[0].open_t

        self.file.read(resume, None)

    def add(self, sample: Sample) -> None:
        with self._lock:
            for ring in self._rings:
                ring.add(sample)
            self._newest = sample.t

    # -- `Kept`

    def write(self, db: sqlite3.Connection, *, may_drop: bool) -> None:
        with self._lock:
            rows = [ring.begin_save() for ring in self._rings]
        for ring, encoded in zip(self._rings, rows, strict=True):
            ring.write(db, encoded, may_drop=may_drop)

    def written(self, ok: bool) -> None:
        if ok:
            with self._lock:
                for ring in self._rings:
                    ring.written()

    def save(self) -> bool:
        return self.file.save([self])

    # -- series

    def series(self, range_s: int, points: int = 720) -> dict[str, Any]:
        """The last `range_s` seconds in at most `points` points of `step` seconds: `t` (unix seconds, the beginning of each) and
        `series`, a list of values by name. It takes milliseconds, and reads the file: call it on a thread."""
        ring, step = self._ring(range_s, points)
        count = max(1, min(range_s, ring.length_s) // step)
        last = self._last_second() // step * step
        start = last - (count - 1) * step

        def read(db: sqlite3.Connection) -> dict[int, bytes]:
            return ring.rows(db, start, last + step)

        rows = self.file.read(read, dict[int, bytes]())
        with self._lock:
            rows |= {t: data for t, data in ring.encoded().items() if start <= t < last + step}
        found: dict[int, Sample] = {}
        for t, data in rows.items():
            sample = _decoded(data)
            if sample is not None and (known := found.setdefault(t // step * step, sample)) is not sample:
                known.merge(sample)
        times = list(range(start, last + step, step))
        shown = {t: sample.values() for t, sample in found.items()}
        nothing: dict[str, float | None] = {}
        return {
            "step": step,
            "t": times,
            "series": {name: [shown.get(t, nothing).get(name) for t in times] for name in NAMES},
        }

    def _ring(self, range_s: int, points: int) -> tuple[_Ring, int]:
        """The coarsest ring that has such points, and reaches back far enough; how long a point is."""
        wanted = max(1, math.ceil(range_s / max(1, points)))
        rings = [ring for ring in self._rings if ring.length_s >= range_s] or [self._rings[-1]]
        ring = max((ring for ring in rings if ring.step <= wanted), key=lambda ring: ring.step, default=rings[0])
        return ring, math.ceil(wanted / ring.step) * ring.step

    def _last_second(self) -> int:
        """The newest that a sample can be there for: the second under way has one only if the server was stopped in it."""
        last = int(self._clock()) - 1
        return self._newest if self._newest is not None and abs(last - self._newest) <= 1 else last


def _decoded(data: bytes) -> Sample | None:
    try:
        return _DECODER.decode(data)
    except msgspec.DecodeError:  # a row that another program wrote
        return None
