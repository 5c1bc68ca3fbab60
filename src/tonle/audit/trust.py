"""`trust`: accept a trail as it is now, by hand.

Does: replace what is known of it (`known_trails.py`). Does not: check it; `verify` does, and then compares with this.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from tonle.audit import day_ledger, known_trails
from tonle.audit.day_ledger import HEAD_NAME, LEDGER_NAME, Head
from tonle.audit.findings import Findings
from tonle.audit.known_trails import KnownTrail
from tonle.audit.ledger_reader import end_of_link
from tonle.audit.signing_keys import SigningKey
from tonle.audit.trusted_key import check_fingerprint, trusted_key
from tonle.errors import ConfigError, NotFound


def trust(directory: Path, *, key_file: Path | None, fingerprint: str | None) -> tuple[KnownTrail | None, KnownTrail]:
    """What was known, and what is known now. Raises `ConfigError`, `NotFound` or `OSError`."""
    before = None
    with contextlib.suppress(ConfigError):  # it cannot be read: that is one reason to be here
        before = known_trails.find(directory)
    if not directory.is_dir():
        raise NotFound(f"there is no directory {directory}")
    key = trusted_key(directory, None, key_file, None, Findings()).key
    check_fingerprint(key, fingerprint)
    now = known_trails.describe(directory, key, "given", key_file=key_file)
    head, end = _signed_end(directory, key)
    now = msgspec.structs.replace(now, head=head, ledger_bytes=end)
    known_trails.replace(known_trails.path_of(directory), now)
    return before, now


def _signed_end(directory: Path, key: SigningKey) -> tuple[Head | None, int]:
    for day in reversed(day_ledger.days_in(directory)):
        with contextlib.suppress(ValueError, FileNotFoundError):
            head = day_ledger.read_head(directory / day / HEAD_NAME)
            if head is None or head.seq == 0 or not key.check(head.message(), head.signature):
                continue
            if (end := end_of_link(directory / day / LEDGER_NAME, 0, head.link)) is not None:
                return head, end
    return None, 0
