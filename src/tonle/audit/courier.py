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
from operator import attrgetter
from typing import Any

import msgspec

from tonle.audit.chain import Chain
from tonle.audit.options import AuditOptions
from tonle.audit.record import Record
from tonle.audit.recover import recover
from tonle.audit.scribe import Facts, Orders, Receipt, receive, send
from tonle.audit.seal import speakable
from tonle.audit.writer import UnsignedError
from tonle.errors import InternalError

log = logging.getLogger("tonle.audit")

EXIT_S = 10.0  # for a process that has nothing left to do

_facts = attrgetter(*Facts.__struct_fields__)
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

    def write(self, records: Sequence[Record], lost: dict[str, Any] | None, *, again: bool = False) -> None:
        if self._line is None:
            recover(self._chain)  # what the last one left half done
            self.start()
        assert self._line is not None
        message = _encode_batch(self._owner(), records, lost, again=again)
        try:  # a Batch, by its places
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
            raise (UnsignedError if receipt.unsigned else OSError)(receipt.errno, receipt.error)

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
    try:
        return bytes(_encode((owner, again, lost, [_facts(record) for record in records])))
    except Exception:  # one of them holds what no message can: find it
        facts = [_sendable(record) for record in records]
        return bytes(_encode((owner, again, speakable(lost), facts)))


def _sendable(record: Record) -> tuple[Any, ...]:
    """Its facts, as well as they can be said."""
    for attempt in (_facts, _speakable_facts):
        try:
            facts: tuple[Any, ...] = attempt(record)
            _encode(facts)
            return facts
        except Exception:
            continue
    log.warning("the audit record of %s is kept without its content", record.request_id)
    record.drop_content()
    return _speakable_facts(record)


def _speakable_facts(record: Record) -> tuple[Any, ...]:
    return tuple(speakable(value) for value in _facts(record))
