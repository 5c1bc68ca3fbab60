"""Repair of what a killed process left. Deterministic, and every repair is written into the chain.

A batch is written as: files, ledger lines, signed head. A process may die between any two, so there may be, in the
newest day only:

- temporary files: removed (or, if a redaction was already in the signed ledger, renamed to finish it)
- half a ledger line: cut off
- ledger lines beyond the signed head: kept as long as each names a record that is here, unchanged and written with
  our key; from the first that does not they are cut off and kept as a note
- records that no ledger line names: entered if written with our key, in the order of their seq; others are left for
  `verify` to name
- files that are no JSON (a power cut): renamed to *.torn
- requests that were open (`intents.py`): each becomes a record with status "interrupted"

A ledger that ends before its signed head is not a crash but a loss: that is noted too and `verify` goes on reporting
it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import msgspec

from tonle.audit import day_ledger, intents
from tonle.audit.chain import Chain, Event, PendingRecord
from tonle.audit.day_ledger import HEAD_NAME, LATEST_NAME, LEDGER_NAME, Head, LedgerLine
from tonle.audit.disk import TEMP_PREFIX, locked
from tonle.audit.document import document, file_name
from tonle.audit.facts import facts_of
from tonle.audit.record import Record
from tonle.audit.record_file import MAX_RECORD_BYTES
from tonle.audit.redaction import Redactor
from tonle.audit.regular_file import OddFileError, hash_regular, read_regular, regular_files
from tonle.audit.seal import chain_of, encode_fields, fields_of, is_ours

log = logging.getLogger("tonle.audit")

TORN_SUFFIX = ".torn"
_OWN_NAMES = (LEDGER_NAME, HEAD_NAME)


def recover(chain: Chain) -> dict[str, Any]:
    """Make the trail whole again; returns what was found. Raises `OSError`."""
    notes: dict[str, Any] = {}
    with locked(chain.directory):
        _remove_temps(chain.directory)
        chain.refresh()
        _check_latest(chain, notes)
        if chain.tail.day is not None:
            _recover_newest(chain, chain.tail.day, notes)
        for day in day_ledger.days_in(chain.directory)[-2:]:
            _remove_temps(chain.directory / day)
        _interrupted(chain, notes)
        if notes:
            log.warning("the audit trail was repaired after a crash: %s", notes)
            chain.append_locked(max(day_ledger.today(), chain.tail.day or ""), [Event("recovery", {"facts": notes})])
        chain.name_latest()
        chain.sign_locked()
    return notes


def _check_latest(chain: Chain, notes: dict[str, Any]) -> None:
    """Whether the newest day is still there. A crash cannot remove one."""
    try:
        latest = day_ledger.read_head(chain.directory / LATEST_NAME)
    except ValueError:
        latest = None
    if latest is None:
        if (chain.tail.after, chain.tail.seq) != (None, 0):  # a crash right after the very first head looks like this
            notes["no_latest"] = True
    elif latest.day > (chain.tail.day or ""):
        notes["lost_day"] = {"day": latest.day, "after_link": latest.link}


def _recover_newest(chain: Chain, day: str, notes: dict[str, Any]) -> None:
    """Days before it are closed: later ones build on them."""
    lines = _mend_ledger(chain, day, notes)
    _finish_redactions(chain, lines)
    known = {line.file for line in lines if line.kind == "record"}
    _enter_orphans(chain, chain.directory / day, known, notes)


def _mend_ledger(chain: Chain, day: str, notes: dict[str, Any]) -> list[LedgerLine]:
    """Cut off what cannot be trusted; note what is missing."""
    path = chain.ledger(day)
    content = path.read_bytes() if path.exists() else b""
    lines: list[LedgerLine] = []
    kept = 0  # bytes
    head = _signed_head(chain, day, notes)
    before = chain.link_before(day)
    for text in content.split(b"\n")[:-1]:
        line = _trusted(chain, path.parent, text, before, head.seq if head else 0)
        if line is None:
            break
        lines.append(line)
        before = line.link
        kept += len(text) + 1
    if head is not None and head.seq > len(lines):
        # The ledger was cut by hand, or by a power failure. The signed head is the evidence; it is about to be replaced.
        notes["truncated"] = {"day": day, "ledger_seq": len(lines), "head_seq": head.seq, "head_link": head.link}
    if kept < len(content):
        cut = content[kept:]
        notes["cut"] = {"day": day, "after_seq": len(lines), "text": cut[:2000].decode(errors="replace")}
        os.truncate(path, kept)
    chain.refresh()
    return lines


def _signed_head(chain: Chain, day: str, notes: dict[str, Any]) -> Head | None:
    try:
        head = day_ledger.read_head(chain.head(day))
        if head is not None and chain.key.check(head.message(), head.signature):
            return head
    except ValueError:
        pass
    notes["bad_head"] = {"day": day}
    return None


def _trusted(chain: Chain, folder: Path, text: bytes, before: str, signed_seq: int) -> LedgerLine | None:
    try:
        line = day_ledger.decode_line(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if line.seq <= signed_seq:
        return line  # the signature vouches for it, or `verify` will say that it does not
    if line.kind != "record" or line.file is None or day_ledger.link_of(day_ledger.body_of(text), before) != line.link:
        return None
    try:
        content = read_regular(folder / line.file, MAX_RECORD_BYTES)
    except (OSError, OddFileError):
        return None
    same = hashlib.sha256(content).hexdigest() == line.sha256
    return line if same and is_ours(content, chain.key) else None


def _finish_redactions(chain: Chain, lines: list[LedgerLine]) -> None:
    last = {(line.day, line.file): line for line in lines if line.kind == "redacted"}
    for (day, file), line in last.items():
        temp = chain.directory / str(day) / f"{TEMP_PREFIX}{file}"
        with contextlib.suppress(FileNotFoundError, OddFileError):
            if hash_regular(temp, MAX_RECORD_BYTES) == line.sha256:
                temp.rename(temp.with_name(str(file)))


def _enter_orphans(chain: Chain, folder: Path, known: set[str | None], notes: dict[str, Any]) -> None:
    pending = []
    for path in regular_files(folder, MAX_RECORD_BYTES):  # others are left for `verify` to name
        if path.name in known or path.name in _OWN_NAMES or path.suffix != ".json" or path.name[0] == ".":
            continue
        content = path.read_bytes()
        try:
            seq = int(chain_of(content)["seq"])
            is_ours_too = is_ours(content, chain.key)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            path.rename(path.with_name(path.name + TORN_SUFFIX))
            notes.setdefault("torn", []).append(f"{folder.name}/{path.name}")
            continue
        if is_ours_too:
            pending.append((seq, PendingRecord(folder.name, path.name, fields_of(content), is_here=True)))
    if pending:
        pending.sort(key=lambda pair: (pair[0], pair[1].file))
        chain.append_locked(folder.name, [record for _, record in pending])
        notes["entered"] = [f"{folder.name}/{record.file}" for _, record in pending]


def _interrupted(chain: Chain, notes: dict[str, Any]) -> None:
    """A record for every request that was open when its process died."""
    intents.remove_drafts(chain.directory)
    left, files = intents.left_behind(chain.directory, chain.key)
    if left:
        files_since = written_files(chain, min(intent.opened_ns for intent in left))
        written = {file.rsplit("_", 2)[1] for file in files_since}  # short ids
        pending = [_interrupted_record(intent) for intent in left if intent.id not in written]
        if pending:
            chain.append_locked(max(day_ledger.today(), chain.tail.day or ""), pending)
            notes["interrupted"] = [record.file for record in pending]
    for path in files:
        path.unlink(missing_ok=True)


def written_files(chain: Chain, since_ns: int) -> set[str]:
    """Names of all records written since."""
    first_day = day_ledger.text_of(since_ns)[:10]
    files: set[str] = set()
    for day in day_ledger.days_in(chain.directory):
        if day >= first_day and chain.ledger(day).exists():
            lines = day_ledger.read_lines(chain.ledger(day).read_bytes())
            files.update(line.file for _, line in lines if line.kind == "record" and line.file)
    return files


def _interrupted_record(intent: intents.Intent) -> PendingRecord:
    record = Record(lambda closed: None, intent.endpoint, request_id=intent.request_id, client=intent.client)
    record.id, record.opened_ns = intent.id, intent.opened_ns
    record.body = intent.body.encode() if intent.body is not None else None
    record.close("interrupted", error={"message": "the server died before this request ended"})
    record.closed_s = record.opened_s  # how long it took is not known
    facts = facts_of(record)
    return PendingRecord(day_ledger.today(), file_name(facts), encode_fields(document(facts, Redactor(()))))


def _remove_temps(folder: Path) -> None:
    for path in folder.glob(f"{TEMP_PREFIX}*"):
        path.unlink(missing_ok=True)
