"""Forgetting on purpose: whole days, or the words of single records, with the chain left whole.

Does: remove and say so in the ledger. Does not: decide when (`AuditOptions.retention_days`, `tonle audit prune`).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import msgspec

from tonle.audit import day_ledger
from tonle.audit.chain import Chain, Event
from tonle.audit.disk import TEMP_PREFIX, locked
from tonle.audit.ledger_reader import texts_of
from tonle.audit.media_store import References, hashes_in, note_line, remove_unreferenced
from tonle.audit.record_file import MAX_RECORD_BYTES, read_record
from tonle.audit.redaction import Redactor
from tonle.audit.regular_file import read_regular
from tonle.audit.seal import REMOVED, SEALED, chain_of, redact

log = logging.getLogger("tonle.audit")

Change = Callable[[Mapping[str, Any]], dict[str, Any]]  # a record's fields -> new values of some of them


def old_days(directory: Path, keep_days: int, *, today: str | None = None) -> list[str]:
    """Days that ended more than `keep_days` ago. Never the newest."""
    limit = (date.fromisoformat(today or day_ledger.today()) - timedelta(days=keep_days)).isoformat()
    return [day for day in day_ledger.days_in(directory)[:-1] if day < limit]


def prune_days(chain: Chain, keep_days: int) -> list[str]:
    """Remove whole days. The ledger keeps each day's last link, on which the day after builds. Raises `OSError`."""
    removed = []
    for day in old_days(chain.directory, keep_days):
        with locked(chain.directory):
            chain.refresh()
            try:
                head, num_records = day_ledger.read_head(chain.head(day)), _count_records(chain, day)
            except ValueError as error:
                log.error(
                    "the audit records of %s are kept: they are not in order (%s); see `tonle audit verify`", day, error
                )
                continue
            media = _media_of_day(chain, day)
            facts = {"records": num_records, "head": msgspec.to_builtins(head)}
            values = {"day": day, "hash": chain.link_before(_day_after(day)), "facts": facts}
            chain.append_locked(max(day_ledger.today(), chain.tail.day or ""), [Event("pruned", values)])
            chain.sign_locked()
            shutil.rmtree(chain.directory / day)
            remove_unreferenced(chain.directory, media)
            removed.append(day)
    return removed


def _count_records(chain: Chain, day: str) -> int:
    """Raises `ValueError` if the ledger cannot be read."""
    try:
        lines = [day_ledger.decode_line(text) for text in texts_of(chain.ledger(day), with_unfinished=False)]
    except FileNotFoundError:
        return 0
    return sum(line.kind == "record" for line in lines)


def _media_of_day(chain: Chain, day: str) -> set[str]:
    references: References = {}
    with contextlib.suppress(FileNotFoundError, ValueError):
        for text in texts_of(chain.ledger(day), with_unfinished=False):
            note_line(references, day, day_ledger.decode_line(text))
    return set().union(*references.values())


def _day_after(day: str) -> str:
    return (date.fromisoformat(day) + timedelta(days=1)).isoformat()


def redact_records(chain: Chain, files: Iterable[Path], change: Change, *, reason: str) -> list[Path]:
    """Change records in place, each with a line in the ledger of today; the media of those that change goes, unless another
    record refers to it. Returns those that changed; files that hold no record are passed over, and the log says which."""
    changed = []
    media: set[str] = set()
    for path in files:
        with locked(chain.directory):
            chain.refresh()
            try:
                if (dropped := _redact_one(chain, path, change, reason)) is not None:
                    changed.append(path)
                    media.update(dropped)
            except (FileNotFoundError, ValueError) as error:
                log.error("%s is left as it is: %s; see `tonle audit verify`", path, error)
    with locked(chain.directory):
        chain.refresh()
        chain.sign_locked()
        remove_unreferenced(chain.directory, media)
    return changed


def _redact_one(chain: Chain, path: Path, change: Change, reason: str) -> tuple[str, ...] | None:
    """The media that the record referred to; None: nothing was changed."""
    content = read_regular(path, MAX_RECORD_BYTES)
    fields = read_record(path)
    values = {name: value for name, value in change(fields).items() if value != fields[name]}
    if not values:
        return None
    media = hashes_in(fields)
    facts: dict[str, Any] = {"fields": sorted(values), "reason": reason} | ({"media": list(media)} if media else {})
    new = redact(content, values, reason=reason, time=day_ledger.now_text())
    # The new file waits beside the old one until the signed ledger knows it; then a crash can only finish the change.
    temp = path.with_name(f"{TEMP_PREFIX}{path.name}")
    chain.disk.write_new(str(temp), new, durable=chain.durable)
    line = {
        "day": path.parent.name, "file": path.name, "hash": str(chain_of(new)["hash"]),
        "sha256": hashlib.sha256(new).hexdigest(), "facts": facts,
    }  # fmt: skip
    chain.append_locked(max(day_ledger.today(), chain.tail.day or ""), [Event("redacted", line)])
    chain.sign_locked()
    temp.rename(path)
    return media


def removing(names: Iterable[str]) -> Change:
    """Take whole fields out."""
    wanted = tuple(names)
    return lambda fields: {name: REMOVED for name in wanted if fields.get(name) is not None}


def masking(redactor: Redactor) -> Change:
    """Mask what patterns find in the words of a record."""

    def change(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: redactor.mask(fields[name], Counter(), field=name) for name in SEALED if fields.get(name) is not None
        }

    return change
