"""`Writer`: who puts closed records into the chain. Here: the thread that asks. In `writer_client.py`: a process of its own.

Does: turn facts into pending records, append them and what the trail lost, sign the head; all or nothing. Does not: queue,
retry, or know what to do about a disk that refuses (`trail.py`).
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tonle.audit.chain import Chain, Event
from tonle.audit.disk import locked
from tonle.audit.facts import Facts, facts_of
from tonle.audit.flusher import Flusher
from tonle.audit.pending import pending_record
from tonle.audit.record import Record
from tonle.audit.recover import written_files
from tonle.audit.redaction import Redactor
from tonle.audit.shorten import shorten_answer


class UnsafeError(OSError):
    """The records are in the chain, but its head could not be brought up to them, or the disk does not take them."""


class WriterDiedError(OSError):
    """The process that writes ended, or was ended because it did not answer. What it was sent may be written or not."""


class OwnerGoneError(OSError):
    """Nothing was written, because the server that wants it counts as dead: no process holds the lock on its page.

    A server that is still running has lost the page (`open/` was cleaned). It keeps the records and creates the page again.
    """

    def __init__(self) -> None:
        super().__init__(errno.ESTALE, "the file in open/ that shows that this server lives is gone; it is made anew")


class Writer(Protocol):
    def pack(self, record: Record) -> None:
        """On the server's thread, when a record is closed: make it quick to write later."""
        ...

    def strip(self, record: Record) -> None:
        """Keep of a record only what can always be written."""
        ...

    def write(self, records: Sequence[Record], lost: dict[str, Any] | None, *, again: bool = False) -> None:
        """Write records and, if there is one, the note of a gap. `again`: some may be in the chain from a try before.

        Raises `OSError`: nothing was written (`UnsafeError`: everything was).
        """
        ...

    def close(self) -> None: ...


class ChainWriter:
    """Writes on the thread that calls."""

    def __init__(
        self, chain: Chain, redactor: Redactor, omit: tuple[str, ...], *, flush_every_s: float | None = None
    ) -> None:
        """`flush_every_s`: how often what was written is brought to the disk; None = the kernel decides."""
        self._chain = chain
        self._redactor = redactor
        self._omit = omit
        self._flusher = None if flush_every_s is None else Flusher(chain.disk, chain.directory, flush_every_s)

    def pack(self, record: Record) -> None:
        """There is nothing to prepare."""

    def strip(self, record: Record) -> None:
        """No other process can die over it."""

    def write(self, records: Sequence[Record], lost: dict[str, Any] | None, *, again: bool = False) -> None:
        for record in records:
            shorten_answer(record)
        self.write_facts([facts_of(record) for record in records], lost, again=again)

    def write_facts(
        self,
        batch: Sequence[Facts],
        lost: dict[str, Any] | None,
        *,
        again: bool = False,
        is_decoded: bool = False,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        """`is_decoded`: see `pending_record`. `may_write` is asked under the lock of the directory; if it says no, nothing
        is written: `OwnerGoneError`."""
        chain = self._chain
        redactor, omit = self._redactor, self._omit
        pending = [pending_record(facts, redactor, omit, is_decoded=is_decoded) for facts in batch]
        with locked(chain.directory):
            if not may_write():
                raise OwnerGoneError
            chain.refresh()
            if again and batch:
                known = written_files(chain, min(facts.opened_ns for facts in batch))
                pending = [record for record in pending if record.file not in known]
            gap = [] if lost is None else [Event("gap", {"facts": lost})]
            chain.append_all([*pending, *gap])
            try:
                chain.sign_locked()
            except OSError as error:
                raise UnsafeError(*error.args) from error
        self._flush_sometimes()

    def _flush_sometimes(self) -> None:
        try:
            if self._flusher is not None:
                self._flusher.ask()
        except OSError as error:
            raise UnsafeError(*error.args) from error

    def close(self) -> None:
        if self._flusher is not None:
            self._flusher.close()
