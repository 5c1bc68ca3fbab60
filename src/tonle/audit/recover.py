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

What cannot be repaired must not keep a server from starting: it is moved to `quarantine/` or left where it is, noted in the
chain as `unrepaired`, and `verify` goes on reporting it. Only a disk that refuses ends recovery.

A ledger that ends before its signed head is not a crash but a loss: that is noted too and `verify` goes on reporting
it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tonle.audit import day_ledger, intents
from tonle.audit.chain import Chain, Event, PendingRecord
from tonle.audit.day_ledger import HEAD_NAME, LATEST_NAME, LEDGER_NAME, MAX_LEDGER_BYTES, Head, LedgerLine
from tonle.audit.disk import TEMP_PREFIX, locked
from tonle.audit.facts import Facts, facts_of
from tonle.audit.media_store import hashes_in
from tonle.audit.pending import pending_record
from tonle.audit.plain_values import said
from tonle.audit.record import Record
from tonle.audit.record_file import MAX_RECORD_BYTES
from tonle.audit.redaction import Redactor
from tonle.audit.regular_file import OddFileError, hash_regular, open_regular, read_regular, regular_files
from tonle.audit.seal import chain_of, fields_of, is_ours

log = logging.getLogger("tonle.audit")

TORN_SUFFIX = ".torn"
QUARANTINE_NAME = "quarantine"  # a folder for what was taken out of the trail; nothing reads it
MAX_UNREPAIRED = 100  # that a recovery line names
_OWN_NAMES = (LEDGER_NAME, HEAD_NAME)


def recover(chain: Chain, redactor: Redactor | None = None, omit: tuple[str, ...] = ()) -> dict[str, Any]:
    """Make the trail whole again; returns what was found. Raises `OSError`.

    `redactor` and `omit` are for the records of requests that were open: the rules of now, not of when they came.
    """
    notes: dict[str, Any] = {}
    with locked(chain.directory):
        _remove_temps(chain.directory)
        day = _newest_day(chain)
        lines: list[LedgerLine] = []
        _set_odd_aside(chain.directory / LATEST_NAME, LATEST_NAME, notes)
        if day is not None:
            for name in (HEAD_NAME, LEDGER_NAME):
                _set_odd_aside(chain.directory / day / name, f"{day}/{name}", notes)
            lines = _mend_ledger(chain, day, notes)  # before anything reads where the chain ends
        chain.refresh()
        _check_latest(chain, notes)
        if day is not None:
            _attempt("redactions", notes, lambda: _finish_redactions(chain, lines))
            _attempt("records", notes, lambda: _enter_orphans(chain, chain.directory / day, lines, notes))
        for name in day_ledger.days_in(chain.directory)[-2:]:
            _remove_temps(chain.directory / name)
        _attempt("open requests", notes, lambda: _interrupted(chain, redactor or Redactor(()), omit, notes))
        if notes:
            log.warning("the audit trail was repaired after a crash: %s", notes)
            chain.append_locked(max(day_ledger.today(), chain.tail.day or ""), [Event("recovery", {"facts": notes})])
        chain.name_latest()
        chain.sign_locked()
    return notes


def _newest_day(chain: Chain) -> str | None:
    days = [day for day in day_ledger.days_in(chain.directory) if chain.head(day).exists()]
    return days[-1] if days else None


def _attempt(what: str, notes: dict[str, Any], repair: Callable[[], None]) -> None:
    """What one repair cannot cope with must not keep the others from being made, nor the server from starting."""
    try:
        repair()
    except OSError:
        raise
    except Exception as error:
        log.exception("the %s of the audit trail could not be repaired", what)
        _note_unrepaired(notes, what, error)


def _note_unrepaired(notes: dict[str, Any], what: str, error: Exception) -> None:
    known = notes.setdefault("unrepaired", [])
    if len(known) < MAX_UNREPAIRED:
        known.append({"what": what, "why": said(f"{type(error).__name__}: {error}")[:500]})


def _set_odd_aside(path: Path, name: str, notes: dict[str, Any]) -> None:
    """What has a file's name and is none (a FIFO, a link, a folder) is renamed, so that the file can be written again."""
    try:
        fd, _ = open_regular(path, MAX_LEDGER_BYTES)
        os.close(fd)
    except FileNotFoundError:
        pass
    except OddFileError as error:
        _note_unrepaired(notes, name, error)
        path.rename(path.with_name(path.name + TORN_SUFFIX))


def _quarantine(chain: Chain, name: str, content: bytes) -> str:
    """Keep what is taken out of the trail. Returns its file."""
    folder = chain.directory / QUARANTINE_NAME
    folder.mkdir(exist_ok=True)
    kept = f"{name}-{secrets.token_hex(8)}"
    chain.disk.write_file(str(folder), kept, content, durable=chain.durable)
    return f"{QUARANTINE_NAME}/{kept}"


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


def _mend_ledger(chain: Chain, day: str, notes: dict[str, Any]) -> list[LedgerLine]:
    """Cut off what cannot be trusted; note what is missing."""
    path = chain.ledger(day)
    content = day_ledger.read_ledger(path)
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
        kept_in = _quarantine(chain, f"{day}-{LEDGER_NAME}", cut)
        begin = cut[:2000].decode(errors="replace")
        notes["cut"] = {"day": day, "after_seq": len(lines), "text": begin, "kept_in": kept_in}
        os.truncate(path, kept)
    return lines


def _signed_head(chain: Chain, day: str, notes: dict[str, Any]) -> Head | None:
    try:
        head = day_ledger.read_head(chain.head(day))
        if head is not None and chain.key.check(head.message(), head.signature):
            return head
    except (ValueError, IsADirectoryError):
        pass
    notes["bad_head"] = {"day": day}
    return None


def _trusted(chain: Chain, folder: Path, text: bytes, before: str, signed_seq: int) -> LedgerLine | None:
    try:
        line = day_ledger.decode_line(text)
    except day_ledger.UNREADABLE:
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


def _enter_orphans(chain: Chain, folder: Path, lines: list[LedgerLine], notes: dict[str, Any]) -> None:
    known = {line.file for line in lines if line.kind == "record"}
    pending = []
    for path in regular_files(folder, MAX_RECORD_BYTES):  # others are left for `verify` to name
        if path.name in known or path.name in _OWN_NAMES or path.suffix != ".json" or path.name[0] == ".":
            continue
        try:
            content = read_regular(path, MAX_RECORD_BYTES)
            seq = int(chain_of(content)["seq"])
            if is_ours(content, chain.key):
                media = hashes_in(msgspec.json.decode(content))
                entry = PendingRecord(folder.name, path.name, fields_of(content), is_here=True, media=media)
                pending.append((seq, entry))
        except PermissionError as error:
            _note_unrepaired(notes, f"{folder.name}/{path.name}", error)
        except Exception:  # a power cut may leave anything
            path.rename(path.with_name(path.name + TORN_SUFFIX))
            notes.setdefault("torn", []).append(f"{folder.name}/{path.name}")
    if pending:
        pending.sort(key=lambda pair: (pair[0], pair[1].file))
        entered = _append_each(chain, folder.name, [record for _, record in pending], notes)
        notes["entered"] = [f"{folder.name}/{record.file}" for record in entered]


def _append_each(chain: Chain, day: str, records: list[PendingRecord], notes: dict[str, Any]) -> list[PendingRecord]:
    """All at once; if one of them cannot be sealed, one by one. Returns those that are in the chain."""
    try:
        chain.append_locked(day, records)
        return records
    except OSError:
        raise
    except Exception:
        log.exception("%d audit records could not be entered together", len(records))
    entered = []
    for record in records:
        try:
            chain.append_locked(day, [record])
            entered.append(record)
        except OSError:
            raise
        except Exception as error:
            _note_unrepaired(notes, f"{day}/{record.file}", error)
    return entered


def _interrupted(chain: Chain, redactor: Redactor, omit: tuple[str, ...], notes: dict[str, Any]) -> None:
    """A record for every request that was open when its process died."""
    intents.remove_drafts(chain.directory)
    left = intents.left_behind(chain.directory, chain.key)
    if left.requests:
        files_since = written_files(chain, min(intent.opened_ns for intent in left.requests))
        written = {parts[1] for file in files_since if len(parts := file.rsplit("_", 2)) == 3}  # their ids
        pending = []
        for intent in [intent for intent in left.requests if intent.id not in written]:
            try:
                pending.append(pending_record(_interrupted_facts(intent), redactor, omit))
            except Exception as error:
                _note_unrepaired(notes, f"the open request {intent.id}", error)
        if pending:
            entered = _append_each(chain, max(day_ledger.today(), chain.tail.day or ""), pending, notes)
            notes["interrupted"] = [record.file for record in entered]
    for path, text in left.unreadable:
        kept_in = _quarantine(chain, path.name, text)
        _note_unrepaired(notes, f"{intents.FOLDER_NAME}/{path.name}", ValueError(f"a line is kept in {kept_in}"))
    for path in left.files:
        path.unlink(missing_ok=True)


def written_files(chain: Chain, since_ns: int) -> set[str]:
    """Names of all records written since. The newest two days always count: a clock may have been set back meanwhile."""
    first_day = day_ledger.text_of(since_ns)[:10]
    files: set[str] = set()
    days = day_ledger.days_in(chain.directory)
    for day in days:
        if day >= first_day or day in days[-2:]:
            with contextlib.suppress(OddFileError):  # `verify` names it
                lines = day_ledger.readable_lines(day_ledger.read_ledger(chain.ledger(day)))
                files.update(line.file for line in lines if line.kind == "record" and line.file)
    return files


def _interrupted_facts(intent: intents.Intent) -> Facts:
    record = Record(lambda closed: None, intent.endpoint, request_id=intent.request_id, client=intent.client)
    record.id, record.opened_ns = intent.id, intent.opened_ns
    record.body = intent.body.encode() if intent.body is not None else None
    record.close("interrupted", error={"message": "the server died before this request ended"})
    record.closed_s = record.opened_s  # how long it took is not known
    return facts_of(record)


def _remove_temps(folder: Path) -> None:
    for path in folder.glob(f"{TEMP_PREFIX}*"):
        with contextlib.suppress(IsADirectoryError, PermissionError):  # not ours, then
            path.unlink(missing_ok=True)
