"""`AnchorKeeper`: while a server writes a trail, the end of its chain is noted outside the directory, again and again.

`verify` compares with these notes without being asked. A note is made after the lines it covers are on the disk, so after any
crash the chain has at least what the notes have. If the chain no longer has the line of the last note, the trail was rolled
back: the note stays as it is, as evidence, and the log says so.

Does: pin the key of the trail, move the anchor on, on a thread of its own. Does not: write to the trail; fail a request or a
start because a note cannot be written.
"""

from __future__ import annotations

import logging
import os
import threading
import time

import msgspec

from tonle.audit import anchor_file, day_ledger, known_trails
from tonle.audit.audit_options import AuditOptions
from tonle.audit.day_ledger import HEAD_NAME, LEDGER_NAME, Head
from tonle.audit.known_trails import KnownTrail
from tonle.audit.ledger_reader import end_of_link, ends_with_link, pruned_since
from tonle.audit.signing_keys import SigningKey
from tonle.audit.trusted_key import check_fingerprint

log = logging.getLogger("tonle.audit")

ANCHOR_EVERY_S = 10.0  # in the state directory
FILE_EVERY_S = 60.0  # lines in the file of `audit_anchor`
MAX_MESSAGES = 100  # in the log, of one keeper
STOP_S = 5.0  # the longest a stop waits for the last note


class AnchorKeeper:
    def __init__(self, options: AuditOptions, key: SigningKey) -> None:
        """Raises `ConfigError` if the key is not the one that the settings pin."""
        check_fingerprint(key, options.fingerprint)
        self._options = options
        self._directory = options.directory
        self._key = key
        self._appended: tuple[str, int] | None = None  # day and seq of the last line in the file
        self._appended_s = 0.0
        self._told: set[str] = set()  # what the log says once
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="tonle-audit-anchor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Everything is written: one last note."""
        if self._thread is not None:
            self._stopping.set()
            self._thread.join(STOP_S)
            self._thread = None

    def _run(self) -> None:
        wait_s = 0.0
        while True:
            is_last = self._stopping.wait(wait_s)
            wait_s = ANCHOR_EVERY_S
            try:
                self.advance(is_last=is_last)
            except (OSError, ValueError) as error:
                self._tell(logging.WARNING, f"the end of the audit trail cannot be noted outside it: {error}")
            except Exception:  # a bug of ours must not end the notes
                log.exception("the audit anchor failed")
            if is_last:
                return

    def advance(self, *, is_last: bool = False) -> None:
        """Note the end of the chain as it is now. Raises `OSError` or `ValueError`."""
        try:
            head = self._advance_known()
        except OSError as error:  # no place for state: the file may be elsewhere
            self._tell(logging.WARNING, f"the end of the audit trail cannot be noted in the state directory: {error}")
            head = self._newest_head()
        if head is not None:
            self._append(head, is_last=is_last)

    def _advance_known(self) -> Head | None:
        """Returns the head that is in the state directory now. None: there is none, or it must stay as it is."""
        known = self._pin()  # before the head is read: another process may move both on
        if known.fingerprint != self._key.fingerprint:
            self._complain(known, f"the key is {self._key.fingerprint} and not {known.fingerprint}")
            return None
        head = self._newest_head()
        if known.head is not None and not self._continues(known, known.head, head):
            old = known.head
            self._complain(known, f"line {old.seq} of {old.day}, noted at {old.time}, is not in the chain any more")
            return None
        if head is not None and (known.head is None or (head.day, head.seq) != (known.head.day, known.head.seq)):
            self._move(known, head)
        return head

    def _pin(self) -> KnownTrail:
        """What is known of this trail; from now on, if nothing was."""
        fresh = known_trails.describe(self._directory, self._key, "serve", key_file=self._options.signing_key)

        def change(known: KnownTrail | None) -> KnownTrail | None:
            if known is None:
                return fresh
            if known.fingerprint != fresh.fingerprint or known.origin != "verify":
                return None
            return msgspec.structs.replace(known, origin="serve", key_file=fresh.key_file)

        return known_trails.update(self._directory, change) or fresh

    def _newest_head(self) -> Head | None:
        """Of the newest day with a line, if it is signed and whole at this moment."""
        for day in reversed(day_ledger.days_in(self._directory)):
            head = day_ledger.read_head(self._directory / day / HEAD_NAME)
            if head is None or head.seq == 0:
                continue
            is_ours = head.kind == "day" and head.day == day and self._key.check(head.message(), head.signature)
            return head if is_ours else None
        return None

    def _continues(self, known: KnownTrail, old: Head, head: Head | None) -> bool:
        """Whether the chain still has the line that was noted last, `old`."""
        if head is not None and (head.day, head.seq) < (old.day, old.seq):
            return False
        if ends_with_link(self._directory / old.day / LEDGER_NAME, known.ledger_bytes, old.link):
            return True
        return not (self._directory / old.day).exists() and old.day in pruned_since(self._directory, old.day)

    def _move(self, known: KnownTrail, head: Head) -> None:
        path = self._directory / head.day / LEDGER_NAME
        start = known.ledger_bytes if known.head is not None and known.head.day == head.day else 0
        end = end_of_link(path, start, head.link)
        if end is None:
            return  # `verify` says what is wrong with this day
        folder = self._directory / head.day
        for path in (folder / LEDGER_NAME, folder / HEAD_NAME, *((folder, self._directory) if start == 0 else ())):
            _flush(str(path))

        def change(now: KnownTrail | None) -> KnownTrail | None:
            if now is None or now.fingerprint != known.fingerprint:
                return None
            if now.head is not None and (now.head.day, now.head.seq) >= (head.day, head.seq):
                return None
            return msgspec.structs.replace(now, head=head, ledger_bytes=end)

        known_trails.update(self._directory, change)

    def _append(self, head: Head, *, is_last: bool) -> None:
        path, place = self._options.anchor, (head.day, head.seq)
        if path is None or place == self._appended:
            return
        now_s = time.monotonic()
        if self._appended is None or is_last or now_s - self._appended_s >= FILE_EVERY_S:
            anchor_file.append(path, head)
            self._appended, self._appended_s = place, now_s

    def _complain(self, known: KnownTrail, what: str) -> None:
        """Once. What is known stays as it is: it is the evidence."""
        self._tell(
            logging.ERROR,
            f"the audit trail in {self._directory} is not the one known since {known.since}: {what}. `tonle audit verify` has "
            "the details; if this was done on purpose, accept it with `tonle audit trust`",
        )

    def _tell(self, level: int, message: str) -> None:
        if message not in self._told and len(self._told) < MAX_MESSAGES:
            self._told.add(message)
            log.log(level, "%s", message)


def _flush(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
