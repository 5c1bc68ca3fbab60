"""What crosses the connection between two engines: one question, one reply, then the blocks as they lie in the cache.

    fetching engine                    leasing engine
    Ask ─────────────────────────────▶
        ◀───────────────────────────── Told: how many blocks, or why none
        ◀───────────────────────────── that many blocks of `block_bytes` bytes, in order
    one byte: they have come ────────▶

Ask and Told are frames: four letters, the version, the length of a msgpack body. Does: read and write these, each within a
deadline and a size. Does not: know leases or caches.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import TypeVar

import msgspec

VERSION = 1
TAKEN = b"\x01"
MAX_BODY_BYTES = 16 * 1024
_HEAD = struct.Struct("!4sHI")  # letters, version, bytes of the body
_LETTERS = b"TNKV"
_encode = msgspec.msgpack.Encoder().encode

Body = TypeVar("Body", bound=msgspec.Struct)


class WireError(Exception):
    """The other end sent something else than it should, or nothing in time."""


class CacheLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What must be equal for the bytes of a block to mean the same at both ends."""

    model: str  # a digest of its files
    dtype: str
    block_size: int  # tokens
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_bytes: int
    tp_size: int = 1  # devices that share a model, each with a part of the heads

    def difference(self, other: CacheLayout) -> str | None:
        """In words; None: there is none."""
        names = [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]
        return (
            "; ".join(f"{name} is {getattr(self, name)} here and {getattr(other, name)} there" for name in names)
            or None
        )


class Ask(msgspec.Struct, forbid_unknown_fields=True):
    layout: CacheLayout
    lease: str  # its name
    token: str  # that proves it
    first: int  # of the lease's blocks
    count: int  # 0: none is wanted, the lease can end
    digest: bytes  # of the tokens up to the last block wanted; empty if none is
    readers: int = 1  # sequences that fetch it, each over a connection of its own


class Told(msgspec.Struct, forbid_unknown_fields=True):
    num_blocks: int = 0
    refusal: str = ""


class Line:
    """One end of a connection, with a moment by which everything must be done."""

    def __init__(self, sock: socket.socket, until_s: float) -> None:
        self.until_s = until_s
        self._sock = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes | memoryview) -> None:
        """Raises `OSError`; a deadline is a `TimeoutError`, which is one."""
        self._sock.settimeout(self._left_s())
        self._sock.sendall(data)

    def receive_into(self, room: memoryview) -> None:
        """Fills all of `room`. Raises `WireError` or `OSError`."""
        while room:
            self._sock.settimeout(self._left_s())
            count = self._sock.recv_into(room)
            if not count:
                raise WireError("it closed the connection")
            room = room[count:]

    def send_frame(self, body: msgspec.Struct) -> None:
        data = _encode(body)
        self.send(_HEAD.pack(_LETTERS, VERSION, len(data)) + data)

    def receive_frame(self, body_type: type[Body]) -> Body:
        """Raises `WireError` or `OSError`."""
        head = self._receive(_HEAD.size)
        letters, version, size = _HEAD.unpack(head)
        if letters != _LETTERS:
            raise WireError("it does not speak this protocol")
        if version != VERSION:
            raise WireError(f"it speaks version {version} of the protocol, not {VERSION}")
        if size > MAX_BODY_BYTES:
            raise WireError(f"a message of {size} bytes is more than {MAX_BODY_BYTES}")
        try:
            return msgspec.msgpack.decode(self._receive(size), type=body_type)
        except msgspec.MsgspecError as error:
            raise WireError(f"its message cannot be read: {error}") from None

    def _receive(self, size: int) -> bytearray:
        data = bytearray(size)
        self.receive_into(memoryview(data))
        return data

    def _left_s(self) -> float:
        left_s = self.until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("it took too long")
        return left_s
