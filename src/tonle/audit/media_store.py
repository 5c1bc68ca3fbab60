"""Media of records: sound and pictures that were sent or made, each in one file named by its hash, beside the days.

    media/ab/ab12…    the bytes whose SHA-256 is ab12…, written once however many records refer to it

The ledger line of a record names the hashes it refers to, so `verify` finds what is missing or altered without opening a
record. A record that is redacted refers to none any more; what nothing refers to is removed.

Does: write, count references, remove, check. Does not: decide what is kept (`audit_media`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tonle.audit import day_ledger
from tonle.audit.audit_options import AuditOptions
from tonle.audit.disk import Disk
from tonle.audit.findings import Findings
from tonle.audit.ledger_reader import texts_of
from tonle.audit.record import Record
from tonle.audit.regular_file import OddFileError, hash_regular

FOLDER_NAME = "media"
MAX_MEDIA_BYTES = 1 << 30  # of a file that is hashed
MAX_OF_RECORD = 64  # files that one record refers to
_HASH = re.compile(r"[0-9a-f]{64}")

References = dict[tuple[str, str], tuple[str, ...]]  # day and file of a record -> hashes


def media_name(sha256: str) -> str:
    """Relative to the trail's directory."""
    return f"{FOLDER_NAME}/{sha256[:2]}/{sha256}"


def write_media_of(records: Iterable[Record], disk: Disk, options: AuditOptions) -> None:
    """Raises `OSError`."""
    for record in records:
        if record.media_data:
            write_media(disk, options.directory, record.media_data, durable=options.fsync == "always")


def write_media(disk: Disk, directory: Path, media: Mapping[str, bytes], *, durable: bool) -> None:
    """Those that are not there yet. Raises `OSError`."""
    for sha256, data in media.items():
        path = directory / media_name(sha256)
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size == len(data):
                continue
        path.parent.mkdir(parents=True, exist_ok=True)
        disk.write_file(str(path.parent), sha256, data, durable=durable)


def hashes_in(facts: Any) -> tuple[str, ...]:
    """Of a ledger line, or of a record's field: whatever it is, only hashes come out."""
    named = facts.get("media") if isinstance(facts, Mapping) else facts
    if not isinstance(named, list | tuple):
        return ()
    return tuple(each for each in named[:MAX_OF_RECORD] if isinstance(each, str) and _HASH.fullmatch(each))


def note_line(references: References, day: str, line: day_ledger.LedgerLine) -> None:
    """Lines must come in their order."""
    if line.kind == "record" and (hashes := hashes_in(line.facts)):
        references[day, str(line.file)] = hashes
    elif line.kind == "redacted" and line.facts and "media" in line.facts:
        references.pop((str(line.day), str(line.file)), None)


def remove_unreferenced(directory: Path, hashes: Iterable[str]) -> int:
    """Of `hashes`, those that no record refers to any more. For those who hold the lock. Returns how many."""
    wanted = set(hashes)
    if not wanted:
        return 0
    references: References = {}
    for day in day_ledger.days_in(directory):
        with contextlib.suppress(FileNotFoundError, OddFileError):
            for text in texts_of(directory / day / day_ledger.LEDGER_NAME, with_unfinished=False):
                if b'"media"' in text:
                    with contextlib.suppress(ValueError):
                        note_line(references, day, day_ledger.decode_line(text))
    num_removed = 0
    for sha256 in wanted.difference(*references.values()):
        with contextlib.suppress(FileNotFoundError):
            (directory / media_name(sha256)).unlink()
            num_removed += 1
    return num_removed


def check_media(directory: Path, references: References, found: Findings) -> int:
    """Every file that a record refers to is here, unchanged. Returns how many there should be."""
    named: dict[str, str] = {}
    for (day, file), hashes in references.items():
        for sha256 in hashes:
            named.setdefault(sha256, f"{day}/{file}")
    for sha256, record in named.items():
        name = media_name(sha256)
        try:
            if hash_regular(directory / name, MAX_MEDIA_BYTES) != sha256:
                found.add("edited", name, f"its content is not what {record} refers to")
        except FileNotFoundError:
            found.add("deleted", name, f"{record} refers to it and it is gone")
        except OddFileError as error:
            found.add("unreadable", name, str(error))
    return len(named)
