"""`verify`: what is wrong with a trail, file by file. An empty list of findings means: nothing.

A day is in order if its ledger links up from the day before to its signed head, and every file it names is here with
the very bytes it names, or the bytes that a later signed redaction names, in which case the record's own hash must
still come out. Files that no ledger line names are findings too. With the bytes compared there is no need to parse: only
files that differ are looked into, to say how.

Does: read only. Does not: repair (`recover.py`). Cannot see: that the whole directory, heads included, was put back
to an earlier copy; keep a head elsewhere (`tonle audit head`) and pass it as `anchor`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from tonle.audit import day_ledger, seal
from tonle.audit.audit_options import KEY_NAME
from tonle.audit.day_ledger import GENESIS, HEAD_NAME, LATEST_NAME, LEDGER_NAME, Head, LedgerLine
from tonle.audit.disk import TEMP_PREFIX, locked
from tonle.audit.recover import TORN_SUFFIX
from tonle.audit.signing_keys import PUBLIC_NAME, SigningKey, load_key
from tonle.errors import ConfigError, NotFound

# edited: a file has other content · deleted: it is gone · swapped: it holds another record of the day · reordered: the
# ledger's lines do not follow each other · truncated: the end is missing · signature: a head is not signed by the key
# foreign: no ledger line names it · day: a whole day is missing or does not follow the one before
Problem = Literal["edited", "deleted", "swapped", "reordered", "truncated", "signature", "foreign", "day"]

CHUNK = 2000  # files a worker checks at a time


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    problem: Problem
    file: str  # relative to the trail's directory
    detail: str

    def __str__(self) -> str:
        return f"{self.problem}: {self.file}: {self.detail}"


class Report(msgspec.Struct, kw_only=True):
    findings: list[Finding]
    days: list[str]
    num_records: int
    num_redacted: int
    notes: list[str]  # repairs, removals and gaps that the chain itself tells of
    key: str | None  # fingerprint
    last: str | None  # link at the end of the chain, to be kept elsewhere

    @property
    def ok(self) -> bool:
        return not self.findings


@dataclass(slots=True)
class Day:
    """What was found of one day, before any record is read."""

    name: str
    lines: list[LedgerLine] = field(default_factory=list)
    texts: list[bytes] = field(default_factory=list)
    head: Head | None = None
    names: set[str] = field(default_factory=set)  # of files


def verify(
    directory: Path,
    *,
    day: str | None = None,
    key_file: Path | None = None,
    anchor: str | None = None,
    num_workers: int | None = None,
) -> Report:
    """Check the whole trail, or the records of one day. `anchor` is a link that must be in it.

    Raises `NotFound` if there is no trail, `ConfigError` if there is no key to check signatures with.
    """
    key = _key(directory, key_file)
    found: list[Finding] = []
    with locked(directory, shared=True):
        days = [_read_day(directory, name, found) for name in day_ledger.days_in(directory)]
        latest = _read_head(directory / LATEST_NAME, LATEST_NAME, found)
    if not days and latest is None:
        raise NotFound(f"there is no audit trail in {directory}")
    if day is not None and day not in [entry.name for entry in days]:
        found.append(Finding(problem="day", file=day, detail="there is no such day"))
    pruned = {line.day: line for entry in days for line in entry.lines if line.kind == "pruned"}
    for before, entry in zip([None, *days], days, strict=False):
        found += _check_ledger(entry, before, pruned)
        found += _check_head(entry, key)
    found += _check_latest(latest, days, pruned, key)
    if anchor is not None and anchor not in {line.link for entry in days for line in entry.lines}:
        found.append(Finding(problem="truncated", file=LEDGER_NAME, detail=f"no line has the link {anchor}"))
    wanted = [entry for entry in days if day is None or entry.name == day]
    redacted = {(line.day, line.file): line for entry in days for line in entry.lines if line.kind == "redacted"}
    found += _check_files(directory, wanted, redacted, num_workers)
    torn = {name for entry in days for line in entry.lines if line.facts for name in line.facts.get("torn", ())}
    for entry in wanted:
        found += _foreign(entry, torn)
    if day is not None:
        found = [finding for finding in found if finding.file.startswith((day, LATEST_NAME, LEDGER_NAME))]
    return Report(
        findings=found,
        days=[entry.name for entry in wanted],
        num_records=sum(line.kind == "record" for entry in wanted for line in entry.lines),
        num_redacted=len(redacted),
        notes=[note for entry in days for line in entry.lines if (note := _note(entry.name, line))],
        key=key.fingerprint,
        last=days[-1].lines[-1].link if days and days[-1].lines else None,
    )


def _key(directory: Path, key_file: Path | None) -> SigningKey:
    if not directory.is_dir():
        raise NotFound(f"there is no directory {directory}")
    if key_file is not None:
        return load_key(key_file)
    for name in (PUBLIC_NAME, KEY_NAME):
        if (directory / name).exists():
            return load_key(directory / name)
    raise ConfigError(f"no key in {directory}; name the one that signs this trail with --key-file", param="key_file")


# -- a day's own files


def _read_day(directory: Path, name: str, found: list[Finding]) -> Day:
    day = Day(name)
    with os.scandir(directory / name) as entries:
        day.names = {entry.name for entry in entries}
    day.head = _read_head(directory / name / HEAD_NAME, f"{name}/{HEAD_NAME}", found)
    path = directory / name / LEDGER_NAME
    if not path.exists():
        return day
    content = path.read_bytes()
    for number, text in enumerate(content.split(b"\n"), 1):
        if not text:
            continue
        try:
            day.lines.append(day_ledger.decode_line(text))
            day.texts.append(text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            detail = f"line {number} cannot be read"
            found.append(Finding(problem="edited", file=f"{name}/{LEDGER_NAME}", detail=detail))
    return day


def _read_head(path: Path, name: str, found: list[Finding]) -> Head | None:
    try:
        return day_ledger.read_head(path)
    except ValueError as error:
        found.append(Finding(problem="signature", file=name, detail=f"the head cannot be read: {error}"))
        return None


def _check_ledger(day: Day, before: Day | None, pruned: dict[str | None, LedgerLine]) -> Iterator[Finding]:
    """Does each line follow the one above it, and the first the day before?"""
    file = f"{day.name}/{LEDGER_NAME}"
    link = GENESIS
    if day.lines:
        yield from _check_start(day.lines[0], day.name, before, pruned)
        link = day.lines[0].prev or GENESIS
    seq = 0
    for text, line in zip(day.texts, day.lines, strict=True):
        seq += 1
        subject = f"{day.name}/{line.file}" if line.kind == "record" and line.file else file
        if line.seq != seq:
            detail = f"the ledger has seq {line.seq} where {seq} should be"
            yield Finding(problem="reordered", file=subject, detail=detail)
            seq = line.seq
        elif day_ledger.link_of(day_ledger.body_of(text), link) != line.link:
            detail = f"its ledger line (seq {seq}) was changed, or does not follow the one before it"
            yield Finding(problem="reordered", file=subject, detail=detail)
        link = line.link
        if line.kind == "recovery" and line.facts:
            yield from _told_losses(day.name, line.facts)


def _check_start(
    line: LedgerLine, name: str, before: Day | None, pruned: dict[str | None, LedgerLine]
) -> Iterator[Finding]:
    expected_day = before.name if before is not None else None
    if line.after == expected_day:
        expected = before.lines[-1].link if before is not None and before.lines else GENESIS
        if before is not None and not before.lines and before.head is not None:
            expected = before.head.link
        if line.prev != expected:
            where = f"{line.after}/{LEDGER_NAME}" if line.after else f"{name}/{LEDGER_NAME}"
            yield Finding(problem="truncated", file=where, detail=f"it does not end with the link that {name} follows")
    elif line.after in pruned:
        if pruned[line.after].hash != line.prev:
            detail = f"it follows {line.after}, which ended otherwise when it was pruned"
            yield Finding(problem="day", file=name, detail=detail)
    else:
        yield Finding(problem="day", file=str(line.after), detail=f"the day before {name} is missing")


def _told_losses(name: str, facts: dict[str, Any]) -> Iterator[Finding]:
    """What a restart found gone. Signed, so it stays a finding."""
    if cut := facts.get("truncated"):
        detail = (
            f"at a restart {cut['head_seq'] - cut['ledger_seq']} signed lines after seq {cut['ledger_seq']} were gone"
        )
        yield Finding(problem="truncated", file=f"{cut['day']}/{LEDGER_NAME}", detail=detail)
    if lost := facts.get("lost_day"):
        yield Finding(problem="day", file=lost["day"], detail="at a restart the whole day was gone")
    if bad := facts.get("bad_head"):
        file = f"{bad['day']}/{HEAD_NAME}"
        yield Finding(
            problem="signature", file=file, detail="at a restart the head was missing or not signed by the key"
        )
    for left in facts.get("unrepaired", ()):
        detail = f"at a restart on {name} it could not be repaired ({left['why']})"
        yield Finding(problem="edited", file=left["what"], detail=detail)
    if facts.get("no_latest"):
        yield Finding(problem="day", file=LATEST_NAME, detail=f"at a restart on {name} it was missing")


def _check_head(day: Day, key: SigningKey) -> Iterator[Finding]:
    file, head = f"{day.name}/{HEAD_NAME}", day.head
    if head is None:
        if day.lines or day.names - {HEAD_NAME}:
            yield Finding(problem="signature", file=file, detail="the day has no head that can be read")
        return
    if not _is_signed(head, "day", key) or head.day != day.name:
        yield Finding(problem="signature", file=file, detail=f"the head is not signed by the key {key.fingerprint}")
        return
    last = day.lines[-1].seq if day.lines else 0
    if head.seq > last:
        detail = f"the signed head is at seq {head.seq}, the ledger ends at {last}"
        yield Finding(problem="truncated", file=f"{day.name}/{LEDGER_NAME}", detail=detail)
    elif head.seq < last:
        detail = f"{last - head.seq} lines after the signed head (a crash? `tonle audit recover` repairs one)"
        yield Finding(problem="signature", file=f"{day.name}/{LEDGER_NAME}", detail=detail)
    elif day.lines and head.link != day.lines[-1].link:
        yield Finding(
            problem="edited", file=f"{day.name}/{LEDGER_NAME}", detail="it ends otherwise than its signed head"
        )


def _check_latest(latest: Head | None, days: Sequence[Day], pruned: Any, key: SigningKey) -> Iterator[Finding]:
    if latest is None:
        yield Finding(
            problem="day", file=LATEST_NAME, detail="it is missing: which day should be the last is not known"
        )
    elif not _is_signed(latest, "latest", key):
        detail = f"it is not signed by the key {key.fingerprint}"
        yield Finding(problem="signature", file=LATEST_NAME, detail=detail)
    elif latest.day not in {day.name for day in days}:
        yield Finding(problem="day", file=latest.day, detail="the last day is missing")


def _is_signed(head: Head, kind: str, key: SigningKey) -> bool:
    return head.kind == kind and key.check(head.message(), head.signature)


# -- the records


@dataclass(frozen=True, slots=True)
class Expected:
    """What a file should be."""

    file: str  # day/name
    hash: str
    sha256: str
    redacted: str | None  # the bytes' hash after the last redaction


def _check_files(
    directory: Path, days: Sequence[Day], redacted: dict[Any, LedgerLine], num_workers: int | None
) -> list[Finding]:
    expected: list[Expected] = []
    found: list[Finding] = []
    for day in days:
        for line in day.lines:
            if line.kind == "record" and line.file:
                later = redacted.get((day.name, line.file))
                new = later.sha256 if later is not None else None
                name = f"{day.name}/{line.file}"
                expected.append(Expected(name, str(line.hash), str(line.sha256), new))
    by_hash = {entry.hash: entry for entry in expected}
    for entry, actual in _compare(directory, expected, num_workers):
        found.append(_explain(directory, entry, actual, by_hash))
    return found


def _foreign(day: Day, torn: set[str]) -> Iterator[Finding]:
    """Files that no ledger line names. `torn` are those that recovery put aside."""
    told = {line.file for line in day.lines} | {HEAD_NAME, LEDGER_NAME}
    for name in sorted(day.names - told):
        if not name.startswith(TEMP_PREFIX) and f"{day.name}/{name}".removesuffix(TORN_SUFFIX) not in torn:
            detail = "no ledger line names it (a crash? `tonle audit recover` repairs one)"
            yield Finding(problem="foreign", file=f"{day.name}/{name}", detail=detail)


def _compare(
    directory: Path, expected: list[Expected], num_workers: int | None
) -> Iterator[tuple[Expected, str | None]]:
    """Entries whose file is not what it should be, with the hash of what is there; None if nothing is."""
    root = str(directory)
    chunks = [expected[start : start + CHUNK] for start in range(0, len(expected), CHUNK)]
    if num_workers is None:
        num_workers = min(2 * (os.cpu_count() or 1), 8)
    # Threads: waiting for a cold disk is most of the work, and hashing lets others run too.
    with ThreadPoolExecutor(num_workers) as pool:
        for differing in pool.map(compare_chunk, [root] * len(chunks), chunks):
            yield from differing


def compare_chunk(root: str, chunk: Sequence[Expected]) -> list[tuple[Expected, str | None]]:
    """Read, hash, compare."""
    differing: list[tuple[Expected, str | None]] = []
    sha256 = hashlib.sha256
    for entry in chunk:
        try:
            fd = os.open(f"{root}/{entry.file}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            differing.append((entry, None))
            continue
        try:
            content = os.read(fd, 1 << 20)
            while len(content) % (1 << 20) == 0 and (more := os.read(fd, 1 << 20)):
                content += more
        finally:
            os.close(fd)
        actual = sha256(content).hexdigest()
        if actual != (entry.redacted or entry.sha256) or (entry.redacted and not _hash_holds(content, entry.hash)):
            differing.append((entry, actual))
    return differing


def _hash_holds(content: bytes, expected: str) -> bool:
    try:
        return seal.check(content) == expected
    except (ValueError, KeyError, TypeError):
        return False


def _explain(directory: Path, entry: Expected, actual: str | None, by_hash: dict[str, Expected]) -> Finding:
    if actual is None:
        return Finding(problem="deleted", file=entry.file, detail="the ledger names it and it is gone")
    if entry.redacted and actual == entry.sha256:
        detail = "its redaction was not finished; `tonle audit recover` finishes it"
        return Finding(problem="edited", file=entry.file, detail=detail)
    content = (directory / entry.file).read_bytes()
    try:
        number = seal.check(content)
    except (ValueError, KeyError, TypeError) as error:
        return Finding(problem="edited", file=entry.file, detail=str(error) or type(error).__name__)
    if number == entry.hash:
        chain = seal.chain_of(content)
        detail = "its layout was changed" if not chain.get("redacted") else "a field was removed without a ledger line"
        return Finding(problem="edited", file=entry.file, detail=detail)
    if (other := by_hash.get(number)) is not None:
        return Finding(problem="swapped", file=entry.file, detail=f"it holds the record of {other.file}")
    return Finding(problem="edited", file=entry.file, detail="its content is not what was recorded")


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
