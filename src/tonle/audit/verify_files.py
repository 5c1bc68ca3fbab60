"""The second half of a verification: is every record that a ledger names here, with the very bytes it names?

With the bytes compared there is no need to parse: only files that differ are looked into, to say how. Files are hashed in
pieces and parsed one at a time, so memory does not depend on what is in them.

Does: read only, and only regular files. Does not: check ledgers (`verify_ledgers.py`).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from tonle.audit import day_ledger, seal
from tonle.audit.day_ledger import HEAD_NAME, LEDGER_NAME
from tonle.audit.disk import TEMP_PREFIX
from tonle.audit.findings import Findings
from tonle.audit.ledger_reader import texts_of
from tonle.audit.recover import TORN_SUFFIX
from tonle.audit.regular_file import OddFileError, hash_regular, read_regular
from tonle.audit.verify_ledgers import ChainFacts, Day

CHUNK = 500  # files a worker checks at a time
MAX_RECORD_BYTES = 1 << 30  # of a record that is hashed
MAX_PARSED_BYTES = 128 << 20  # of one that is looked into
MAX_EXPLAINED = 1000  # differing files that are looked into

_parsing = threading.Lock()  # one at a time: it needs memory, and would not be faster otherwise


class Expected(NamedTuple):
    """What a file should be."""

    file: str  # day/name
    hash: str  # the record's own
    sha256: str
    redacted: str | None  # the bytes' hash after the last redaction


class Differing(NamedTuple):
    entry: Expected
    actual: str | None  # hash of what is there; None if nothing is
    odd: str | None = None  # why it could not be read


def check_files(
    directory: Path,
    days: Sequence[Day],
    names: dict[str, set[str]],
    facts: ChainFacts,
    found: Findings,
    num_workers: int,
) -> None:
    """`names`: files of the days that were listed under the lock; others are listed here."""
    differing: list[Differing] = []
    for day in days:
        left = names.pop(day.name) if day.name in names else list_folder(directory, day.name, found)
        for each in _compare(directory, _expected(directory, day, left, facts), num_workers):
            if each.odd is not None:
                found.add("unreadable", each.entry.file, each.odd)
            elif each.actual is None:
                found.add("deleted", each.entry.file, "the ledger names it and it is gone")
            elif len(differing) < MAX_EXPLAINED:
                differing.append(each)
            else:
                found.add("edited", each.entry.file, "its content is not what was recorded")
        _foreign(day.name, left, facts, found)
    _explain_all(directory, days, differing, found)


def list_folder(directory: Path, day: str, found: Findings) -> set[str]:
    try:
        with os.scandir(directory / day) as entries:
            return {entry.name for entry in entries}
    except OSError as error:
        found.add("unreadable", day, f"the folder cannot be listed: {error.strerror or error}")
        return set()


def _expected(directory: Path, day: Day, left: set[str], facts: ChainFacts) -> Iterator[Expected]:
    """What the ledger names, in its order. Takes those names out of `left`."""
    for line in _records(directory, day):
        left.discard(line.file)
        new = facts.redacted.get((day.name, line.file))
        yield Expected(f"{day.name}/{line.file}", line.hash, line.sha256, new)


class _Line(NamedTuple):
    file: str
    hash: str
    sha256: str


def _records(directory: Path, day: Day) -> Iterator[_Line]:
    """The ledger once more, as far as it was read the first time. What is wrong with it was said then."""
    try:
        for text in texts_of(directory / day.name / LEDGER_NAME, day.size):
            try:
                line = day_ledger.decode_line(text) if text else None
            except ValueError:
                continue
            if line is not None and line.kind == "record" and day_ledger.is_file_name(line.file):
                yield _Line(str(line.file), str(line.hash), str(line.sha256))
    except (FileNotFoundError, OddFileError):
        return


def _foreign(day: str, left: set[str], facts: ChainFacts, found: Findings) -> None:
    """Files that no ledger line names."""
    for name in sorted(left - {HEAD_NAME, LEDGER_NAME}):
        if not name.startswith(TEMP_PREFIX) and f"{day}/{name}".removesuffix(TORN_SUFFIX) not in facts.torn:
            detail = "no ledger line names it (a crash? `tonle audit recover` repairs one)"
            found.add("foreign", f"{day}/{name}", detail)


def _compare(directory: Path, expected: Iterator[Expected], num_workers: int) -> Iterator[Differing]:
    """Entries whose file is not what it should be, in their order."""
    root = str(directory)
    # Threads: waiting for a cold disk is most of the work, and hashing lets others run too.
    with ThreadPoolExecutor(num_workers) as pool:
        running: deque[Future[list[Differing]]] = deque()
        while chunk := list(islice(expected, CHUNK)):
            running.append(pool.submit(compare_chunk, root, chunk))
            if len(running) > 2 * num_workers:
                yield from running.popleft().result()
        for last in running:
            yield from last.result()


def compare_chunk(root: str, chunk: Sequence[Expected]) -> list[Differing]:
    """Read, hash, compare."""
    differing: list[Differing] = []
    for entry in chunk:
        path = f"{root}/{entry.file}"
        try:
            actual = hash_regular(path, MAX_RECORD_BYTES)
            if actual != (entry.redacted or entry.sha256) or (entry.redacted and not _hash_holds(path, entry.hash)):
                differing.append(Differing(entry, actual))
        except FileNotFoundError:
            differing.append(Differing(entry, None))
        except OddFileError as error:
            differing.append(Differing(entry, None, str(error)))
    return differing


def _hash_holds(path: str, expected: str) -> bool:
    with _parsing:
        return _own_hash(read_regular(path, MAX_PARSED_BYTES))[0] == expected


def _own_hash(content: bytes) -> tuple[str | None, str]:
    """The hash that a record should have by its content; or None, and why there is none."""
    try:
        return seal.check(content), ""
    except RecursionError:
        return None, "it is nested too deeply"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return None, str(error) or type(error).__name__


def _explain_all(directory: Path, days: Sequence[Day], differing: list[Differing], found: Findings) -> None:
    """How files differ. Which record one holds instead is known after the ledgers were searched for it."""
    numbers: list[tuple[Differing, str | None, str, bool]] = []
    for each in differing:
        try:
            content = read_regular(directory / each.entry.file, MAX_PARSED_BYTES)
        except (FileNotFoundError, OddFileError) as error:
            numbers.append((each, None, str(error), False))
            continue
        number, why = _own_hash(content)
        numbers.append((each, number, why, number is not None and bool(seal.chain_of(content).get("redacted"))))
    wanted = {number for each, number, _, _ in numbers if number not in (None, each.entry.hash)}
    holders: dict[str | None, str] = {}
    if wanted:
        for day in days:
            holders |= {
                line.hash: f"{day.name}/{line.file}" for line in _records(directory, day) if line.hash in wanted
            }
    for each, number, why, is_redacted in numbers:
        _explain(each, number, why, holders.get(number), found, is_redacted=is_redacted)


def _explain(
    each: Differing, number: str | None, why: str, holder: str | None, found: Findings, *, is_redacted: bool
) -> None:
    entry = each.entry
    if entry.redacted and each.actual == entry.sha256:
        found.add("edited", entry.file, "its redaction was not finished; `tonle audit recover` finishes it")
    elif number is None:
        found.add("edited", entry.file, why)
    elif number == entry.hash:
        detail = "a field was removed without a ledger line" if is_redacted else "its layout was changed"
        found.add("edited", entry.file, detail)
    elif holder is not None:
        found.add("swapped", entry.file, f"it holds the record of {holder}")
    else:
        found.add("edited", entry.file, "its content is not what was recorded")
