"""The process that writes: records come through a socket, files go to the disk, and the server's thread is free.

    python -m tonle.audit.scribe FD         # started by `ScribeProcess`, never by hand

A batch is written as `ChainWriter` writes it, and answered when it is in the chain. The scribe ends when its server's
end of the socket closes, whatever closed it. A server that was killed cannot say what it had sent, so recovery counts
its requests as interrupted; the scribe therefore asks, under the same lock as recovery, whether its server still holds
the lock on its intents (`intents.py`), and writes nothing for a dead one: never two records for one request. The receipt
says so, for a server that does live and only lost that file.

Does: the far end, flushing included. Does not: repair, retry or prune; the server's trail does.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec

from tonle.audit.chain import Chain
from tonle.audit.facts import Facts
from tonle.audit.redaction import Redactor
from tonle.audit.signing_keys import load_key
from tonle.audit.writer import ChainWriter, UnsafeError

log = logging.getLogger("tonle.audit")

LENGTH_BYTES = 8  # before every message


class Orders(msgspec.Struct):
    """The first message: where and how to write."""

    directory: str
    key_file: str
    durable: bool
    flush_every_s: float | None
    redact: tuple[str, ...]
    omit: tuple[str, ...]


class Batch(msgspec.Struct, array_like=True):
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
    """The facts again; without the answer, if that is of a kind nobody thought of."""
    try:
        return _decode_facts(packed)
    except msgspec.ValidationError:
        values = dict(zip(Facts.__struct_fields__, msgspec.msgpack.decode(packed), strict=True))
        log.warning("the audit record of %s is kept without its answer", values["request_id"])
        return Facts(**{**values, "answer": None, "warnings": ["the answer could not be recorded"]})


_decode_facts = msgspec.msgpack.Decoder(Facts).decode


def send(line: socket.socket, message: bytes) -> None:
    line.sendall(len(message).to_bytes(LENGTH_BYTES, "little") + message)


def receive(line: socket.socket) -> bytes | None:
    """The next message; None if no more will come."""
    head = _exactly(line, LENGTH_BYTES)
    return None if head is None else _exactly(line, int.from_bytes(head, "little"))


def _exactly(line: socket.socket, size: int) -> bytes | None:
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        num_bytes = line.recv_into(view)
        if not num_bytes:
            return None
        view = view[num_bytes:]
    return bytes(buffer)


def lives(owner: str) -> bool:
    """Whether somebody holds the lock on that file. Recovery asks the same question in the same way."""
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


def serve(line: socket.socket) -> None:
    """Batch after batch, until the server's end closes."""
    first = receive(line)
    if first is None:
        return
    orders = msgspec.msgpack.decode(first, type=Orders)
    chain = Chain(Path(orders.directory), load_key(Path(orders.key_file)), durable=orders.durable)
    writer = ChainWriter(chain, Redactor(orders.redact), orders.omit, flush_every_s=orders.flush_every_s)
    decode, encode = msgspec.msgpack.Decoder(Batch).decode, msgspec.msgpack.Encoder().encode
    while (message := receive(line)) is not None:
        send(line, encode(_write(writer, decode(message))))


def _write(writer: ChainWriter, batch: Batch) -> Receipt:
    try:
        facts = [unpack(packed) for packed in batch.records]
        writer.write_facts(facts, batch.lost, again=batch.again, may_write=lambda: lives(batch.owner))
    except OSError as error:
        return Receipt(error.strerror or str(error), error.errno or 0, unsafe=isinstance(error, UnsafeError))
    except Exception as error:
        log.exception("the audit writer failed")
        return Receipt(f"{type(error).__name__}: {error}", broken=True)
    return Receipt()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a terminal sends them to all: the server decides when to stop
    # A connection that breaks: the server died between two bytes.
    with socket.socket(fileno=int(sys.argv[1])) as line, contextlib.suppress(ConnectionError):
        serve(line)


if __name__ == "__main__":
    main()
