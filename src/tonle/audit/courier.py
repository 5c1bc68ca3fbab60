"""`ScribeProcess`: a writer whose work is done by another process (`scribe.py`).

Does: start it, send it batches and wait for its receipt, start another one if it dies. Does not: decide when to try
again. A thread that waits for a receipt holds nothing the server needs: formatting, hashing and files cost the
server's process only the copy of the facts.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tonle.audit.audit_options import AuditOptions
from tonle.audit.chain import Chain
from tonle.audit.facts import facts_of, values_of
from tonle.audit.record import Record
from tonle.audit.recover import recover
from tonle.audit.scribe import Orders, Receipt, receive, send
from tonle.audit.seal import speakable
from tonle.audit.writer import UnsafeError
from tonle.errors import InternalError

log = logging.getLogger("tonle.audit")

EXIT_S = 10.0  # for a process that has nothing left to do

_encode = msgspec.msgpack.Encoder(enc_hook=str).encode
_decode = msgspec.msgpack.Decoder(Receipt).decode


class ScribeProcess:
    """Methods are for one thread at a time."""

    def __init__(self, chain: Chain, options: AuditOptions, owner: Callable[[], str]) -> None:
        """`owner` names a file that this process holds locked as long as it lives."""
        self._chain = chain
        self._owner = owner
        self._orders = Orders(
            directory=str(options.directory.resolve()),
            key_file=str(options.signing_key.resolve()),
            durable=options.fsync == "always",
            flush_every_s=options.flush_every_s,
            redact=options.redact,
            omit=options.omit,
        )
        self._line: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Raises `OSError`."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "tonle.audit.scribe", str(theirs.fileno())]
            try:
                self._process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
                )
            except OSError:
                ours.close()
                raise
        self._line = ours
        send(ours, _encode(self._orders))

    def pack(self, record: Record) -> None:
        """Its facts become bytes at once: they are small, the objects they come from are not, and may go."""
        try:
            record.packed = _encode(values_of(record))
        except Exception:  # it holds what no message can: see about it later
            return
        record.body = record.answer = record.output = None

    def write(self, records: Sequence[Record], lost: dict[str, Any] | None, *, again: bool = False) -> None:
        if self._line is None:
            recover(self._chain)  # what the last one left half done
            self.start()
        assert self._line is not None
        message = _encode_batch(self._owner(), records, lost, again=again)
        try:
            send(self._line, message)
            reply = receive(self._line)
        except ConnectionError:
            reply = None
        if reply is None:
            self.close()
            raise OSError(errno.EPIPE, "the process that writes records died; another one is started")
        receipt = _decode(reply)
        if receipt.broken:
            raise InternalError(f"the process that writes records failed: {receipt.error}")
        if receipt.error is not None:
            raise (UnsafeError if receipt.unsafe else OSError)(receipt.errno, receipt.error)

    def close(self) -> None:
        """The process ends on its own when it has nothing left to do."""
        line, self._line = self._line, None
        process, self._process = self._process, None
        if line is not None:
            line.close()
        if process is not None:
            try:
                process.wait(EXIT_S)
            except subprocess.TimeoutExpired:
                log.warning("the process that writes audit records (%d) does not end, and is killed", process.pid)
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(EXIT_S)


def _encode_batch(owner: str, records: Sequence[Record], lost: dict[str, Any] | None, *, again: bool) -> bytes:
    """A `Batch`."""
    packed = [msgspec.Raw(record.packed or _pack_oddly(record)) for record in records]
    return bytes(_encode((owner, again, speakable(lost), packed)))


def _pack_oddly(record: Record) -> bytes:
    """The facts of a record that holds something odd, as well as they can be said."""
    facts = facts_of(record)
    try:
        return bytes(_encode([speakable(value) for value in values_of(facts)]))
    except Exception:
        log.warning("the audit record of %s is kept without its content", record.request_id)
        return bytes(_encode([speakable(value) for value in values_of(facts.without_content())]))
