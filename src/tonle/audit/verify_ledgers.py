"""The first half of a verification: ledgers, heads and the order of days.

Each day's ledger is read line by line and never held whole. What other parts of the check need from it (removed days,
redactions, repairs, anchored lines) is collected in `ChainFacts`.

Does: read only, and only regular files. Does not: look at records (`verify_files.py`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tonle.audit import day_ledger
from tonle.audit.day_ledger import GENESIS, HEAD_NAME, LATEST_NAME, LEDGER_NAME, Head, LedgerLine
from tonle.audit.findings import MAX_NOTES, Findings
from tonle.audit.ledger_reader import ANY_SIZE, texts_of
from tonle.audit.media_store import References, note_line
from tonle.audit.regular_file import OddFileError, kind_of, open_regular
from tonle.audit.signing_keys import SigningKey

# A ledger is read as far as its signed head goes, and a little further to say what follows.
MAX_LINES_AFTER_HEAD = 100_000
MAX_LINES_UNSIGNED = 1_000_000  # where no head says how many there should be


@dataclass(slots=True)
class Day:
    """What one pass over a day's ledger showed."""

    name: str
    head: Head | None = None
    is_signed: bool = False
    size: int = 0  # of the ledger, bytes
    first: LedgerLine | None = None
    last_seq: int = 0
    last_link: str = GENESIS
    num_records: int = 0
    is_empty: bool = True  # there is nothing in the folder but a head


@dataclass(slots=True)
class ChainFacts:
    """What the ledgers say about other files and days."""

    pruned: dict[str, str] = field(default_factory=dict)  # day -> its last link
    redacted: dict[tuple[str, str], str] = field(default_factory=dict)  # day and file -> SHA-256 of the new bytes
    torn: set[str] = field(default_factory=set)  # day/file that a recovery put aside
    media: References = field(default_factory=dict)  # which files records refer to
    notes: list[str] = field(default_factory=list)
    links: set[str] = field(default_factory=set)  # those of `wanted` that some line has
    wanted: frozenset[str] = frozenset()  # links to look for


def list_days(directory: Path, found: Findings) -> list[str]:
    """Names of the day folders. What has a day's name and is no folder is a finding."""
    try:
        with os.scandir(directory) as entries:
            days = [entry for entry in entries if day_ledger.is_day(entry.name)]
        for entry in days:
            if not entry.is_dir(follow_symlinks=False):
                kind = kind_of(entry.stat(follow_symlinks=False).st_mode)
                kind = "a file" if stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode) else kind
                found.add("unreadable", entry.name, f"it is {kind}, not the folder of a day")
        return sorted(entry.name for entry in days if entry.is_dir(follow_symlinks=False))
    except OSError as error:
        found.add("unreadable", ".", f"the directory cannot be listed: {error.strerror or error}")
        return []


def read_head(directory: Path, name: str, found: Findings) -> Head | None:
    try:
        return day_ledger.read_head(directory / name)
    except OddFileError as error:
        found.add("unreadable", name, str(error))
    except ValueError as error:
        found.add("signature", name, f"the head cannot be read: {error}")
    return None


def is_signed(head: Head, kind: str, key: SigningKey) -> bool:
    return head.kind == kind and key.check(head.message(), head.signature)


def read_day(directory: Path, name: str, key: SigningKey, facts: ChainFacts, found: Findings) -> Day:
    """Check that each line of the day's ledger follows the one above it."""
    day = Day(name, head=read_head(directory, f"{name}/{HEAD_NAME}", found))
    day.is_signed = day.head is not None and is_signed(day.head, "day", key) and day.head.day == name
    day.is_empty = _has_only_a_head(directory / name)
    path, file = directory / name / LEDGER_NAME, f"{name}/{LEDGER_NAME}"
    try:
        fd, day.size = open_regular(path, ANY_SIZE)
        os.close(fd)
        _read_lines(day, file, texts_of(path, day.size), facts, found)
    except FileNotFoundError:
        pass  # the head says whether that is a loss
    except OddFileError as error:
        found.add("unreadable", file, str(error))
    return day


def _read_lines(day: Day, file: str, texts: Iterator[bytes], facts: ChainFacts, found: Findings) -> None:
    limit = MAX_LINES_UNSIGNED
    if day.is_signed and day.head is not None:
        limit = day.head.seq + MAX_LINES_AFTER_HEAD
    seq, link = 0, GENESIS
    for number, text in enumerate(texts, 1):
        if number > limit:
            found.add(
                "edited", file, f"it goes on after line {limit:,}, long after its signed head; the rest was not read"
            )
            return
        if not text:
            continue
        try:
            line = day_ledger.decode_line(text)
        except ValueError:
            found.add("edited", file, f"line {number} cannot be read")
            continue
        if day.first is None:
            day.first, link = line, line.prev or GENESIS
        seq += 1
        subject = f"{day.name}/{line.file}" if line.kind == "record" and line.file else file
        if line.seq != seq:
            found.add("reordered", subject, f"the ledger has seq {line.seq} where {seq} should be")
            seq = line.seq
        elif day_ledger.link_of(day_ledger.body_of(text), link) != line.link:
            detail = f"its ledger line (seq {seq}) was changed, or does not follow the one before it"
            found.add("reordered", subject, detail)
        link = line.link
        day.last_seq, day.last_link = line.seq, line.link
        _take_facts(day, line, facts, found)


def _take_facts(day: Day, line: LedgerLine, facts: ChainFacts, found: Findings) -> None:
    if line.link in facts.wanted:
        facts.links.add(line.link)
    if line.facts:
        note_line(facts.media, day.name, line)
    if line.kind == "record":
        day.num_records += 1
        if not day_ledger.is_file_name(line.file):
            found.add(
                "edited", f"{day.name}/{LEDGER_NAME}", f"line {line.seq} names a file that cannot be in the folder"
            )
        return
    if line.kind == "pruned" and line.day is not None:
        facts.pruned[line.day] = str(line.hash)
    elif line.kind == "redacted":
        facts.redacted[str(line.day), str(line.file)] = str(line.sha256)
    try:
        if line.kind == "recovery" and line.facts:
            facts.torn.update(map(str, line.facts.get("torn", ())))
            _told_losses(day.name, line.facts, found)
        note = _note(day.name, line)
    except (TypeError, KeyError, AttributeError):
        note = None
        found.add("edited", f"{day.name}/{LEDGER_NAME}", f"line {line.seq} says what no server writes")
    if note is not None and len(facts.notes) < MAX_NOTES:
        facts.notes.append(note)


def _told_losses(name: str, facts: dict[str, Any], found: Findings) -> None:
    """What a restart found gone. Signed, so it stays a finding."""
    if cut := facts.get("truncated"):
        detail = (
            f"at a restart {cut['head_seq'] - cut['ledger_seq']} signed lines after seq {cut['ledger_seq']} were gone"
        )
        found.add("truncated", f"{cut['day']}/{LEDGER_NAME}", detail)
    if lost := facts.get("lost_day"):
        found.add("day", str(lost["day"]), "at a restart the whole day was gone")
    if bad := facts.get("bad_head"):
        detail = "at a restart the head was missing or not signed by the key"
        found.add("signature", f"{bad['day']}/{HEAD_NAME}", detail)
    for left in facts.get("unrepaired", ()):
        found.add("edited", str(left["what"]), f"at a restart on {name} it could not be repaired ({left['why']})")
    if facts.get("no_latest"):
        found.add("day", LATEST_NAME, f"at a restart on {name} it was missing")


def _note(name: str, line: LedgerLine) -> str | None:
    facts = line.facts or {}
    if line.kind == "pruned":
        return f"{line.day}: removed on {name} with {facts.get('records')} records"
    if line.kind == "recovery":
        return f"{name}: repaired after a crash at seq {line.seq}: {', '.join(facts)}"
    if line.kind == "gap":
        return f"{name}: {'; '.join(_gap_words(facts))} before seq {line.seq}"
    return None


def _gap_words(facts: dict[str, Any]) -> Iterator[str]:
    if "lost" in facts:
        yield f"{facts.get('lost')} records lost and {facts.get('refused')} requests refused"
    for row in facts.get("unrecorded", ()):
        yield (
            f"{row['requests']} refused requests of {row['client']} ({row['http_status']}, {row['code']}) between"
            f" {row['from']} and {row['to']} were not recorded one by one"
        )


def check_order(days: Sequence[Day], facts: ChainFacts, key: SigningKey, found: Findings) -> None:
    """Does each day follow the one before it, and end where its signed head says?"""
    before: Day | None = None
    for day in days:
        if day.first is not None:
            _check_start(day.first, day.name, before, facts, found)
        _check_head(day, key, found)
        before = day


def _check_start(line: LedgerLine, name: str, before: Day | None, facts: ChainFacts, found: Findings) -> None:
    if line.after == (before.name if before is not None else None):
        expected = before.last_link if before is not None else GENESIS
        if before is not None and before.first is None and before.head is not None:
            expected = before.head.link
        if line.prev != expected:
            where = f"{line.after}/{LEDGER_NAME}" if line.after else f"{name}/{LEDGER_NAME}"
            found.add("truncated", where, f"it does not end with the link that {name} follows")
    elif line.after in facts.pruned:
        if facts.pruned[line.after] != line.prev:
            found.add("day", name, f"it follows {line.after}, which ended otherwise when it was pruned")
    else:
        found.add("day", str(line.after), f"the day before {name} is missing")


def _check_head(day: Day, key: SigningKey, found: Findings) -> None:
    file, head = f"{day.name}/{HEAD_NAME}", day.head
    if head is None:
        if day.first is not None or not day.is_empty:
            found.add("signature", file, "the day has no head that can be read")
    elif not day.is_signed:
        found.add("signature", file, f"the head is not signed by the key {key.fingerprint[:16]}…")
    elif head.seq > day.last_seq:
        detail = f"the signed head is at seq {head.seq}, the ledger ends at {day.last_seq}"
        found.add("truncated", f"{day.name}/{LEDGER_NAME}", detail)
    elif head.seq < day.last_seq:
        detail = f"{day.last_seq - head.seq} lines after the signed head (a crash? `tonle audit recover` repairs one)"
        found.add("signature", f"{day.name}/{LEDGER_NAME}", detail)
    elif day.first is not None and head.link != day.last_link:
        found.add("edited", f"{day.name}/{LEDGER_NAME}", "it ends otherwise than its signed head")


def check_latest(latest: Head | None, days: Sequence[Day], key: SigningKey, found: Findings) -> None:
    if latest is None:
        found.add("day", LATEST_NAME, "it is missing: which day should be the last is not known")
    elif not is_signed(latest, "latest", key):
        found.add("signature", LATEST_NAME, f"it is not signed by the key {key.fingerprint[:16]}…")
    elif latest.day not in {day.name for day in days}:
        found.add("day", latest.day, "the last day is missing")


def _has_only_a_head(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return all(entry.name == HEAD_NAME for entry in entries)
    except OSError:
        return False
