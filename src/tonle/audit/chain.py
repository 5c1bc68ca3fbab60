"""`Chain`: the end of the trail, where new lines go.

Does: number, seal and write records and events, open new days, sign heads; all under the directory's lock, so that
several processes may write to one trail. Does not: queue, retry or repair (`trail.py`, `recover.py`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from tonle.audit import day_ledger
from tonle.audit.day_ledger import GENESIS, HEAD_NAME, LATEST_NAME, LEDGER_NAME, LedgerLine
from tonle.audit.disk import Disk, locked
from tonle.audit.regular_file import OddFileError
from tonle.audit.seal import Plain, seal
from tonle.audit.signing_keys import SigningKey


@dataclass(frozen=True, slots=True)
class PendingRecord:
    """A record that has no place yet."""

    day: str
    file: str
    fields: Plain
    is_here: bool = False  # a file of that name holds it already, and stays if anything goes wrong
    media: tuple[str, ...] = ()  # hashes of the files it refers to


@dataclass(frozen=True, slots=True)
class Event:
    """Something else to write down."""

    kind: day_ledger.Kind
    values: dict[str, Any] = field(default_factory=dict)  # fields of LedgerLine


@dataclass(frozen=True, slots=True)
class Tail:
    """Where the chain ends. `day` None: there is no chain yet."""

    day: str | None = None
    after: str | None = None  # the day before it in the trail
    seq: int = 0  # of the last line; 0: the day has a head and no line yet
    link: str = GENESIS
    size: int = 0  # of the day's ledger, bytes


class Chain:
    """One process's grip on a trail. Methods are for one thread at a time."""

    def __init__(self, directory: Path, key: SigningKey, *, disk: Disk | None = None, durable: bool = False) -> None:
        self.directory = directory
        self.key = key
        self.disk = disk or Disk()
        self.durable = durable  # flush every batch before it counts as written
        self.tail = Tail()
        self._stamp = 0  # when the directory last changed; a day opened by another process changes it
        self._signed: tuple[str | None, str] = (None, "")  # day and link of the last head written
        self._named: str | None = None  # the day that latest.json is known to name

    def append(self, entries: Sequence[PendingRecord | Event]) -> list[LedgerLine]:
        """Write all or, if the disk refuses, none of the entries of a day. Raises `OSError`."""
        with locked(self.directory):
            self.refresh()
            return self.append_all(entries)

    def sign(self) -> None:
        """Bring the signed head up to the end of the chain. Raises `OSError`."""
        with locked(self.directory):
            self.refresh()
            self.sign_locked()

    def _day_of(self, entry: PendingRecord | Event) -> str:
        """Time in the trail never goes back, whatever clocks do."""
        day = entry.day if isinstance(entry, PendingRecord) else day_ledger.today()
        return max(day, self.tail.day or "")

    # -- for those who hold the lock

    def refresh(self) -> None:
        """Learn what other processes have appended since."""
        stamp = self.directory.stat().st_mtime_ns
        if stamp != self._stamp:
            self._stamp = stamp
            days = [day for day in day_ledger.days_in(self.directory) if self.head(day).exists()]
            if days and days[-1] != self.tail.day:
                self.tail = Tail(days[-1], days[-2] if len(days) > 1 else None, size=-1)  # not the size of any file
        if self.tail.day is None:
            return
        try:
            size = self.ledger(self.tail.day).stat().st_size
        except FileNotFoundError:
            size = 0
        if size != self.tail.size:
            self._read_tail(self.tail.day)

    def append_all(self, entries: Sequence[PendingRecord | Event]) -> list[LedgerLine]:
        """Each to its day."""
        lines: list[LedgerLine] = []
        for day, group in groupby(entries, key=self._day_of):
            lines += self.append_locked(day, list(group))
        return lines

    def append_locked(self, day: str, entries: Sequence[PendingRecord | Event]) -> list[LedgerLine]:
        if day != self.tail.day:
            self._open_day(day)
        self.name_latest()
        tail, folder = self.tail, self.directory / day
        seq, link, now = tail.seq, tail.link, day_ledger.now_text()
        texts: list[bytes] = []
        lines: list[LedgerLine] = []
        try:
            for entry in entries:
                seq += 1
                if isinstance(entry, PendingRecord):
                    line = self._write_record(str(folder), entry, seq, link, now)
                else:
                    line = LedgerLine(seq=seq, kind=entry.kind, time=now, **entry.values)
                if seq == 1:
                    line.after, line.prev = tail.after, tail.link
                texts.append(day_ledger.link(line, link))
                lines.append(line)
                link = line.link
            if self.durable:
                self.disk.sync_folder(folder)
            self.disk.append(folder / LEDGER_NAME, b"".join(texts), durable=self.durable)
        except BaseException:
            self._take_back(folder, entries[: len(lines) + 1])
            raise
        self.tail = Tail(day, tail.after, seq, link, tail.size + sum(map(len, texts)))
        return lines

    def sign_locked(self) -> None:
        tail = self.tail
        if tail.day is None or (tail.day, tail.link) == self._signed:
            return
        head = day_ledger.sign_head(self.key, "day", tail.day, tail.seq, tail.link)
        self.disk.overwrite(self.head(tail.day), head, durable=self.durable)
        self._signed = (tail.day, tail.link)

    def ledger(self, day: str) -> Path:
        return self.directory / day / LEDGER_NAME

    def head(self, day: str) -> Path:
        return self.directory / day / HEAD_NAME

    def _open_day(self, day: str) -> None:
        """The head comes before the first line, so that a ledger without a head is never the work of a crash."""
        self.sign_locked()  # the day before is complete
        (self.directory / day).mkdir(exist_ok=True)
        tail = Tail(day, self.tail.day, 0, self.tail.link, 0)
        self._write_head(self.head(day), "day", tail)
        self.tail = tail

    def name_latest(self) -> None:
        """See to it that `latest.json` names the day of the tail. Before the day's first line is written."""
        if self.tail.day is None or self._named == self.tail.day:
            return
        path = self.directory / LATEST_NAME
        try:
            latest = day_ledger.read_head(path)
        except ValueError:
            latest = None  # recovery has noted it
        if latest is None or latest.day < self.tail.day:
            self._write_head(path, "latest", self.tail)
        self._named = self.tail.day

    def _write_head(self, path: Path, kind: str, tail: Tail) -> None:
        head = day_ledger.sign_head(self.key, kind, str(tail.day), tail.seq, tail.link)
        self.disk.write_file(str(path.parent), path.name, head, durable=self.durable)

    def _write_record(self, folder: str, record: PendingRecord, seq: int, link: str, now: str) -> LedgerLine:
        content, number = seal(record.fields, self.key, seq=seq, prev=link, file=record.file)
        self.disk.write_file(folder, record.file, content, durable=self.durable)
        digest = hashlib.sha256(content).hexdigest()
        facts = {"media": list(record.media)} if record.media else None
        return LedgerLine(seq=seq, kind="record", time=now, file=record.file, hash=number, sha256=digest, facts=facts)

    def _take_back(self, folder: Path, entries: Sequence[PendingRecord | Event]) -> None:
        """No ledger line names these; if they cannot be removed, recovery will find them."""
        for entry in entries:
            if isinstance(entry, PendingRecord) and not entry.is_here:
                with contextlib.suppress(OSError):
                    (folder / entry.file).unlink(missing_ok=True)

    def _read_tail(self, day: str) -> None:
        try:
            content = day_ledger.read_ledger(self.ledger(day))
        except OddFileError as error:  # for those who write, the disk refuses
            raise OSError(errno.EIO, f"{day}/{LEDGER_NAME} cannot be written: {error}") from error
        whole = content.rfind(b"\n") + 1
        if whole < len(content):  # half a line of a process that was killed: under the lock there is no other reason
            os.truncate(self.ledger(day), whole)
        line = day_ledger.last_line(content[:whole])
        if line is None:
            self.tail = Tail(day, self.tail.after, 0, self.link_before(day), whole)
        else:
            self.tail = Tail(day, self.tail.after, line.seq, line.link, whole)

    def link_before(self, day: str) -> str:
        """What the first line of `day` follows."""
        for earlier in reversed([name for name in day_ledger.days_in(self.directory) if name < day]):
            with contextlib.suppress(OddFileError):  # `verify` names it
                if (line := day_ledger.last_line(day_ledger.read_ledger(self.ledger(earlier)))) is not None:
                    return line.link
        return GENESIS
