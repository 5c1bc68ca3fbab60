"""`verify_record`: is one record the one that was written, and in its place?

Checks the file's bytes and its own hash against its line in the ledger, that line's place in the day's chain, and the signed head
that the chain leads to. Other records, and other days (but for redactions), are not looked at: `verify` does all of it.

Does: read one day's ledger and one record. Does not: block for long on a day of ordinary size; call it on a thread all the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from tonle.audit import day_ledger, known_trails, seal
from tonle.audit.day_ledger import LEDGER_NAME, LedgerLine
from tonle.audit.findings import Findings
from tonle.audit.ledger_reader import texts_of
from tonle.audit.regular_file import OddFileError, read_regular, shared_lock
from tonle.audit.signing_keys import SigningKey
from tonle.audit.trusted_key import TrustedKey, trusted_key
from tonle.audit.verify_files import MAX_PARSED_BYTES, Expected, compare_chunk
from tonle.audit.verify_ledgers import ChainFacts, Day, read_day
from tonle.errors import ConfigError

Verdict = Literal["verified", "not verified", "tampered", "none"]


class RecordVerdict(msgspec.Struct, frozen=True):
    verified: Verdict
    detail: str  # what was checked, or what is wrong


NO_RECORD = RecordVerdict("none", "there is no record of it")


def verify_record(
    directory: Path, day: str, file: str, *, key_file: Path | None = None, fingerprint: str | None = None
) -> RecordVerdict:
    """`day` and `file` as the index has them. Whatever is in the directory, this ends with a verdict."""
    found = Findings()
    try:
        trusted = trusted_key(directory, known_trails.find(directory), key_file, fingerprint, found)
    except ConfigError as error:
        return RecordVerdict("not verified", error.message)
    if found.listed:
        return RecordVerdict("not verified", f"the key of the trail is in doubt: {found.listed[0].detail}")
    facts = _facts_for(directory, day)
    with shared_lock(directory):
        read = read_day(directory, day, trusted.key, facts, found)
        _add_redactions(directory, day, file, trusted.key, facts, found)
        line = _line_of(directory, read, file)
        if line is None:
            return RecordVerdict("tampered", f"no line of {day}/{LEDGER_NAME} names it")
        differs = _difference(directory, day, line, facts)
    if found.listed:
        return RecordVerdict("tampered", f"the ledger is not in order: {found.listed[0]}")
    return differs or _place(read, line, facts, trusted)


def _facts_for(directory: Path, day: str) -> ChainFacts:
    """The link that the day's head has signed is looked for as the ledger is read."""
    try:
        head = day_ledger.read_head(directory / day / day_ledger.HEAD_NAME)
    except ValueError:
        head = None  # `read_day` says what is wrong with it
    return ChainFacts(wanted=frozenset() if head is None else frozenset([head.link]))


def _line_of(directory: Path, day: Day, file: str) -> LedgerLine | None:
    mark = file.encode(errors="surrogatepass")
    try:
        for text in texts_of(directory / day.name / LEDGER_NAME, day.size):
            if mark in text:
                try:
                    line = day_ledger.decode_line(text)
                except ValueError:
                    continue
                if line.kind == "record" and line.file == file:
                    return line
    except (FileNotFoundError, OddFileError):
        return None
    return None


def _add_redactions(
    directory: Path, day: str, file: str, key: SigningKey, facts: ChainFacts, found: Findings
) -> None:  # fmt: skip
    """A field may be removed on any later day: the ledgers of those are read if the record says that it was."""
    try:
        content = read_regular(directory / day / file, MAX_PARSED_BYTES)
        is_redacted = bool(seal.chain_of(content).get("redacted"))
    except (OSError, ValueError, RecursionError, AttributeError):
        return
    if is_redacted and (day, file) not in facts.redacted:
        for later in day_ledger.days_in(directory):
            if later > day:
                read_day(directory, later, key, facts, found)


def _difference(directory: Path, day: str, line: LedgerLine, facts: ChainFacts) -> RecordVerdict | None:
    name = f"{day}/{line.file}"
    redacted = facts.redacted.get((day, str(line.file)))
    differing = compare_chunk(str(directory), [Expected(name, str(line.hash), str(line.sha256), redacted)])
    if not differing:
        return None
    if differing[0].odd is not None:
        return RecordVerdict("tampered", f"its file cannot be read: {differing[0].odd}")
    if differing[0].actual is None:
        return RecordVerdict("tampered", "its file is gone")
    return RecordVerdict("tampered", "its file is not what was written: the ledger has another hash of it")


def _place(day: Day, line: LedgerLine, facts: ChainFacts, trusted: TrustedKey) -> RecordVerdict:
    head, key = day.head, trusted.key.fingerprint[:16]
    if head is None or not day.is_signed:
        return RecordVerdict("tampered", f"the head of {day.name} is missing or not signed by the key {key}…")
    if head.link not in facts.links:
        return RecordVerdict("tampered", f"the ledger of {day.name} does not lead to its signed head")
    if line.seq > head.seq:
        return RecordVerdict("not verified", f"its line, {line.seq}, comes after the signed head at line {head.seq}")
    if trusted.first_use:
        detail = "it fits its ledger, but the key that signed it was found in the trail itself, and nowhere else"
        return RecordVerdict("not verified", detail)
    return RecordVerdict(
        "verified",
        f"its content, its place (line {line.seq} of {day.name}) and the head signed at {head.time} by {key}… fit together; "
        f"the key is {trusted.source}",
    )
