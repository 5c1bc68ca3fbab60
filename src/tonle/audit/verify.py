"""`verify`: what is wrong with a trail, file by file. An empty list of findings means: nothing.

A day is in order if its ledger links up from the day before to its signed head, and every file it names is here with
the very bytes it names, or the bytes that a later signed redaction names, in which case the record's own hash must
still come out. Files that no ledger line names are findings too. The key that checks signatures comes from outside the
directory (`trusted_key.py`), and so do the anchors, lines that the chain had at some time and must still have.

Whatever is in the directory, this ends with a verdict: only regular files are read, with bounds (`regular_file.py`), and
everything else is a finding.

Does: read the trail; on request, remember a trail that is in order (`known_trails.py`). Does not: repair (`recover.py`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tonle.audit import anchor_file, known_trails
from tonle.audit.day_ledger import LATEST_NAME, LEDGER_NAME, Head
from tonle.audit.findings import Finding, Findings, Problem, Report
from tonle.audit.known_trails import KnownTrail
from tonle.audit.media_store import FOLDER_NAME as MEDIA_FOLDER
from tonle.audit.media_store import check_media
from tonle.audit.regular_file import OddFileError, shared_lock
from tonle.audit.signing_keys import SigningKey
from tonle.audit.trusted_key import TrustedKey, trusted_key
from tonle.audit.verify_files import check_files, list_folder
from tonle.audit.verify_ledgers import (
    ChainFacts,
    Day,
    check_latest,
    check_order,
    is_signed,
    list_days,
    read_day,
    read_head,
)  # fmt: skip
from tonle.config.cores import num_cores
from tonle.errors import NotFound

__all__ = ["Finding", "Findings", "Problem", "Report", "verify"]

MAX_WORKERS = 8


class Anchor(NamedTuple):
    """A line that the chain had."""

    link: str
    place: str  # where it is noted, in words
    head: Head | None = None
    is_trusted: bool = True  # otherwise the head's signature counts


def verify(
    directory: Path,
    *,
    day: str | None = None,
    key_file: Path | None = None,
    fingerprint: str | None = None,
    anchor: str | None = None,
    anchor_path: Path | None = None,
    remember: bool = False,
    num_workers: int | None = None,
) -> Report:
    """Check the whole trail, or the records of one day.

    `anchor` is a link that must be in it, `anchor_path` a file of such (`audit_anchor`). `remember`: if all is in order, note
    its key and its end for the next time.

    Raises `NotFound` if there is no trail, `ConfigError` if there is no key to check signatures with.
    """
    if not os.path.isdir(directory):  # noqa: PTH112 - pathlib raises for some names
        raise NotFound(f"there is no directory {directory}")
    found = Findings()
    known = known_trails.find(directory)  # before the chain is read: a server may move the anchor on meanwhile
    trusted = trusted_key(directory, known, key_file, fingerprint, found)
    anchors = _anchors(known, trusted, anchor, anchor_path, found)
    facts = ChainFacts(wanted=frozenset(entry.link for entry in anchors))
    with shared_lock(directory):
        days = [read_day(directory, name, trusted.key, facts, found) for name in list_days(directory, found)]
        latest = read_head(directory, LATEST_NAME, found)
        names = {entry.name: list_folder(directory, entry.name, found) for entry in days[-1:]}
    if not days and latest is None and not found.listed and not anchors:
        raise NotFound(f"there is no audit trail in {directory}")
    if day is not None and day not in [entry.name for entry in days]:
        found.add("day", day, "there is no such day")
    check_order(days, facts, trusted.key, found)
    check_latest(latest, days, trusted.key, found)
    places = _check_anchors(anchors, facts, trusted.key, found)
    wanted = [entry for entry in days if day is None or entry.name == day]
    if num_workers is None:
        num_workers = min(2 * num_cores(), MAX_WORKERS)
    check_files(directory, wanted, names, facts, found, num_workers)
    of_days = {place: hashes for place, hashes in facts.media.items() if day is None or place[0] == day}
    num_media = check_media(directory, of_days, found)
    report = _report(wanted, days, trusted, facts, found, places, day)
    report.num_media = num_media
    if remember and day is None and report.ok:
        given = (key_file is not None or fingerprint is not None) and not trusted.first_use
        _remember(directory, trusted.key, days[-1] if days else None, report, given=given)
    return report


def _report(
    wanted: list[Day], days: list[Day], trusted: TrustedKey, facts: ChainFacts, found: Findings, places: list[str],
    day: str | None,
) -> Report:  # fmt: skip
    listed = found.listed
    if day is not None:  # what concerns the whole trail concerns every day of it
        listed = [
            entry
            for entry in listed
            if entry.problem in ("key", "rollback")
            or entry.file.startswith((day, LATEST_NAME, LEDGER_NAME, ".", f"{MEDIA_FOLDER}/"))
        ]
    return Report(
        findings=listed,
        num_unlisted=found.num_unlisted,
        days=[entry.name for entry in wanted],
        num_records=sum(entry.num_records for entry in wanted),
        num_redacted=len(facts.redacted),
        notes=facts.notes,
        key=trusted.key.fingerprint,
        key_from=trusted.source,
        first_use=trusted.first_use,
        anchors=places,
        last=days[-1].last_link if days and days[-1].first is not None else None,
    )


# -- anchors


def _anchors(
    known: KnownTrail | None, trusted: TrustedKey, link: str | None, path: Path | None, found: Findings
) -> list[Anchor]:
    """Everything that is noted outside the directory."""
    anchors = [] if link is None else [Anchor(link, "--anchor")]
    if known is not None and known.head is not None:
        anchors.append(Anchor(known.head.link, "the state directory", known.head))
    if path is not None:
        anchors += _from_file(path, trusted.key, found)
    return anchors


def _from_file(path: Path, key: SigningKey, found: Findings) -> list[Anchor]:
    try:
        heads = [head for head in anchor_file.read_tail(path) if head.key == key.fingerprint]
    except FileNotFoundError:
        found.add("rollback", str(path), "there is no such file to compare with")
        return []
    except OddFileError as error:
        found.add("rollback", str(path), f"it cannot be compared with: {error}")
        return []
    if not heads:
        found.add("rollback", str(path), "it has no line of a trail with this key")
    return [Anchor(head.link, str(path), head, is_trusted=False) for head in heads]


def _check_anchors(anchors: Sequence[Anchor], facts: ChainFacts, key: SigningKey, found: Findings) -> list[str]:
    """Every noted line must be in the chain, unless its day was pruned. Returns the places that agree."""
    agreeing: dict[str, bool] = {}
    for anchor in anchors:
        head = anchor.head
        if anchor.link in facts.links or (head is not None and head.day in facts.pruned):
            agreeing.setdefault(anchor.place, True)
        elif head is None:
            found.add("truncated", LEDGER_NAME, f"no line has the link {anchor.link}")
        elif anchor.is_trusted or is_signed(head, "day", key):  # others were put there by someone else
            detail = f"line {head.seq}, noted at {head.time} in {anchor.place}, is gone: the trail was rolled back"
            found.add("rollback", f"{head.day}/{LEDGER_NAME}", detail)
            agreeing[anchor.place] = False
    return [place for place, is_agreeing in agreeing.items() if is_agreeing]


def _remember(directory: Path, key: SigningKey, last: Day | None, report: Report, *, given: bool) -> None:
    """Never fails: a user without a place for state can verify all the same."""

    def change(known: KnownTrail | None) -> KnownTrail | None:
        known = known or known_trails.describe(directory, key, "verify")
        if known.fingerprint != key.fingerprint:
            return None
        if given and known.origin == "verify":
            known = msgspec.structs.replace(known, origin="given")
        if last is None or last.head is None or last.head.seq == 0:
            return known
        if known.head is not None and (known.head.day, known.head.seq) >= (last.head.day, last.head.seq):
            return known
        return msgspec.structs.replace(known, head=last.head, ledger_bytes=last.size)

    try:
        known_trails.update(directory, change)
    except OSError as error:
        report.notes.append(f"the trail cannot be remembered for the next time: {error}")
