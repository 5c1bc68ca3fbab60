"""The process that writes: records come through a socket, files go to the disk, and the server's thread is free.

    python -m tonle.audit.writer_process CONTROL_FD         # started by `WriterClient`, never by hand

A batch is written as `ChainWriter` writes it, and answered when it is in the chain. This process ends when the server's
end of the control socket closes, whatever closed it. A server that was killed cannot say what it had sent, so recovery
counts its requests as interrupted; the writer process therefore asks, under the same lock as recovery, whether its server
still holds the lock on its intents (`intents.py`), and writes nothing for a dead one: never two records for one request.
The receipt says so, for a server that does live and only lost that file.

Does: what happens in the child, flushing included. Does not: repair, retry or prune; the server's trail does.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
from pathlib import Path
from typing import Any

import msgspec

from tonle.audit.body_summary import summary_of
from tonle.audit.chain import Chain
from tonle.audit.facts import Facts, facts_of
from tonle.audit.record import Record
from tonle.audit.redaction import Redactor
from tonle.audit.signing_keys import load_key
from tonle.audit.writer import ChainWriter, UnsafeError
from tonle.child.frames import read_frame, write_frame
from tonle.child.heap import LARGE_BYTES, HeapTrimmer, return_large_blocks
from tonle.child.spawn import ignore_signals, inherited_sockets, read_settings

log = logging.getLogger("tonle.audit")


class WriterSettings(msgspec.Struct):
    """The first message to the child: where and how to write."""

    directory: str
    key_file: str
    durable: bool
    flush_every_s: float | None
    redact: tuple[str, ...]
    omit: tuple[str, ...]


class RecordBatch(msgspec.Struct, array_like=True):
    owner: str  # a file that the server holds locked as long as it lives
    again: bool
    lost: dict[str, Any] | None
    records: list[msgspec.Raw]  # of `Facts`, read one by one: an odd one must not spoil the others


class Receipt(msgspec.Struct, array_like=True):
    """How it went. `unsafe`: all is written, as `UnsafeError` says; `broken`: an error of ours, not the disk's."""

    error: str | None = None
    errno: int = 0
    unsafe: bool = False
    broken: bool = False


def unpack(packed: bytes) -> Facts:
    """The facts again; as far as they can be read. Never raises: others are in the same message."""
    try:
        return _decode_facts(packed)
    except Exception as error:
        reason = error
    try:
        values = dict(zip(Facts.__struct_fields__, msgspec.msgpack.decode(packed), strict=True))
        said_of_answer = values["output"] if values["answer"] is None else values["answer"]
        known = {**values, "answer": None, "unread": None, "output": said_of_answer}
        return Facts(**{**known, "warnings": ["the answer has a form that is not known, and is recorded as it came"]})
    except Exception:
        log.exception("an audit record of %d bytes cannot be read (%s)", len(packed), reason)
    record = Record(lambda closed: None, "/unknown")
    record.close("failed", error={"message": "the record of this request could not be read"})
    record.unread = summary_of(packed)
    return facts_of(record)


_decode_facts = msgspec.msgpack.Decoder(Facts).decode


def lives(owner: str) -> bool:
    """Whether a process holds the lock on that file. Recovery asks the same question in the same way."""
    try:
        fd = os.open(owner, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def serve(control: socket.socket) -> None:
    """Batch after batch, until the server's end closes."""
    settings = read_settings(control, WriterSettings)
    chain = Chain(Path(settings.directory), load_key(Path(settings.key_file)), durable=settings.durable)
    writer = ChainWriter(chain, Redactor(settings.redact), settings.omit, flush_every_s=settings.flush_every_s)
    decode, encode = msgspec.msgpack.Decoder(RecordBatch).decode, msgspec.msgpack.Encoder().encode
    heap = HeapTrimmer()
    while (message := read_frame(control)) is not None:
        num_bytes = len(message)
        write_frame(control, encode(_write(writer, decode(message))))
        if num_bytes > LARGE_BYTES:
            del message
            heap.look()


def _write(writer: ChainWriter, batch: RecordBatch) -> Receipt:
    try:
        facts = [unpack(packed) for packed in batch.records]
        writer.write_facts(facts, batch.lost, again=batch.again, is_decoded=True, may_write=lambda: lives(batch.owner))
    except OSError as error:
        return Receipt(error.strerror or str(error), error.errno or 0, unsafe=isinstance(error, UnsafeError))
    except Exception as error:
        log.exception("the audit writer failed")
        return Receipt(f"{type(error).__name__}: {error}", broken=True)
    return Receipt()


def main() -> None:
    ignore_signals()
    return_large_blocks()
    [control] = inherited_sockets()
    with control, contextlib.suppress(ConnectionError):  # the server died between two bytes
        serve(control)


if __name__ == "__main__":
    main()
