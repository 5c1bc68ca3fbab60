"""`WriterClient`: a writer whose work is done by another process (`writer_process.py`).

Does: start it, send it batches and wait for the receipts; if it dies, start another one with the next write. Does not:
decide when to try again. A thread that waits for a receipt holds nothing the server needs: formatting, hashing and files
cost the server's process only the copy of the facts.
"""

from __future__ import annotations

import errno
import logging
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from tonle.audit.audit_options import AuditOptions
from tonle.audit.chain import Chain
from tonle.audit.facts import facts_of, values_of
from tonle.audit.plain_values import plain
from tonle.audit.record import Record
from tonle.audit.recover import recover
from tonle.audit.redaction import Redactor
from tonle.audit.shorten import MAX_ANSWER_CHARS, shorten_answer
from tonle.audit.writer import UnsafeError, WriterDiedError
from tonle.audit.writer_process import Receipt, WriterSettings, unpack
from tonle.child.frames import read_frame, write_frame
from tonle.child.spawn import exit_reason, spawn
from tonle.errors import InternalError

log = logging.getLogger("tonle.audit")

EXIT_S = 10.0  # for a process that has nothing left to do
ANSWER_S = 60.0  # for a batch; a process that takes longer is stopped or hangs, and is killed
MAX_MESSAGE_BYTES = 16 * 1024**2  # of records in one message, if there are several
LONG_BYTES = MAX_ANSWER_CHARS  # a shorter record cannot hold an answer that has to be cut
MAX_RECORD_BYTES = 256 * 1024**2  # a larger one is kept without its content

_encode = msgspec.msgpack.Encoder(enc_hook=str).encode
_decode = msgspec.msgpack.Decoder(Receipt).decode


class WriterClient:
    """Methods are for one thread at a time."""

    def __init__(self, chain: Chain, options: AuditOptions, owner: Callable[[], str]) -> None:
        """`owner` names a file that this process holds locked as long as it lives."""
        self._chain = chain
        self._owner = owner
        self._redactor = Redactor(options.redact)
        self._settings = WriterSettings(
            directory=str(options.directory.resolve()),
            key_file=str(options.signing_key.resolve()),
            durable=options.fsync == "always",
            flush_every_s=options.flush_every_s,
            redact=options.redact,
            omit=options.omit,
        )
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Raises `OSError`."""
        self._process, self._control = spawn("tonle.audit.writer_process", self._settings, stdout=subprocess.DEVNULL)

    def pack(self, record: Record) -> None:
        """Its facts become bytes at once: they are small, the objects they come from are not, and may go."""
        try:
            packed = _encode(values_of(record))
            if len(packed) > LONG_BYTES:
                shorten_answer(record)
                packed = _encode(values_of(record))
        except Exception:  # it holds what no message can: see about it later
            return
        if len(packed) > MAX_RECORD_BYTES:
            return
        record.packed = packed
        record.body = record.answer = record.output = None

    def strip(self, record: Record) -> None:
        try:
            facts = facts_of(record) if record.packed is None else unpack(record.packed)
            record.packed = _encode(values_of(facts.without_content()))
        except Exception:
            log.exception("the audit record of %s cannot be made shorter", record.request_id)

    def write(self, records: Sequence[Record], lost: dict[str, Any] | None, *, again: bool = False) -> None:
        """In one message, unless the records are so large that they need several; the note of a gap is in the last.

        If one of several fails, those before it are written. The trail tries again with all, and `again` set.
        """
        if self._control is None:
            recover(self._chain, self._redactor, self._settings.omit)  # what the last one left half done
            self.start()
        unsafe: UnsafeError | None = None
        parts = list(_parts([record.packed or _pack_oddly(record) for record in records]))
        for number, packed in enumerate(parts, 1):
            note = lost if number == len(parts) else None
            try:
                self._exchange(_encode_batch(self._owner(), packed, note, again=again))
            except UnsafeError as error:  # this part is written, so the others have to be
                unsafe = error
        if unsafe is not None:
            raise unsafe

    def _exchange(self, message: bytes) -> None:
        """Send a `RecordBatch`, and raise what its receipt says."""
        assert self._control is not None
        self._control.settimeout(ANSWER_S)
        try:
            write_frame(self._control, message)
            reply = read_frame(self._control)
        except TimeoutError:
            self._kill()
            raise WriterDiedError(
                errno.ETIMEDOUT,
                f"the process that writes records did not answer within {ANSWER_S:g} s and is killed; another one is started",
            ) from None
        except ConnectionError:
            reply = None
        if reply is None:
            reason = self._end()
            raise WriterDiedError(
                errno.EPIPE, f"the process that writes records died ({reason}); another one is started"
            )
        receipt = _decode(reply)
        if receipt.broken:
            raise InternalError(f"the process that writes records failed: {receipt.error}")
        if receipt.error is not None:
            raise (UnsafeError if receipt.unsafe else OSError)(receipt.errno, receipt.error)

    def close(self) -> None:
        """The process ends on its own when it has nothing left to do."""
        self._end()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()  # even one that is stopped; the lock on the directory goes with it
        self._end()

    def _end(self) -> str | None:
        """Returns how the process ended, if there was one."""
        control, self._control = self._control, None
        process, self._process = self._process, None
        if control is not None:
            control.close()
        return None if process is None else exit_reason(process, EXIT_S)


def _parts(packed: list[bytes]) -> Iterator[list[bytes]]:
    """What goes into one message each. At least one, which may be empty."""
    part: list[bytes] = []
    num_bytes = 0
    for one in packed:
        if part and num_bytes + len(one) > MAX_MESSAGE_BYTES:
            yield part
            part, num_bytes = [], 0
        part.append(one)
        num_bytes += len(one)
    yield part


def _encode_batch(owner: str, packed: list[bytes], lost: dict[str, Any] | None, *, again: bool) -> bytes:
    """A `RecordBatch`."""
    return bytes(_encode((owner, again, plain(lost), [msgspec.Raw(one) for one in packed])))


def _pack_oddly(record: Record) -> bytes:
    """The facts of a record that is odd or very large, as well as they can be said."""
    shorten_answer(record)
    facts = facts_of(record)
    try:
        packed = bytes(_encode(values_of(facts.made_plain())))
        if len(packed) <= MAX_RECORD_BYTES:
            return packed
    except Exception:  # even so: it is kept without
        log.debug("the audit record %s has values of an unexpected type", facts.id, exc_info=True)
    log.warning("the audit record %s is kept without its content", facts.id)
    return bytes(_encode(values_of(facts.without_content())))
