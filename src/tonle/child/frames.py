"""Messages on a stream socket: 4 bytes of length, little-endian, then the message.

`frame`, `Frames` and `FrameProtocol` are for event loops, `write_frame` and `read_frame` for blocking sockets.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable

MAX_FRAME_BYTES = 2**30  # a longer one is a corrupt length, not a message

_HEADER = struct.Struct("<I")


class FrameError(ConnectionError):
    """What came is no frame, or only a part of one. Nothing more can be read from this connection."""


def frame(body: bytes) -> bytes:
    """Raises `ValueError` if the message is longer than a reader would take."""
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is longer than {MAX_FRAME_BYTES}")
    return _HEADER.pack(len(body)) + body


class Frames:
    """Bytes in, whole messages out."""

    def __init__(self) -> None:
        self._rest = bytearray()  # of a message that has not come whole

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes. Raises `FrameError`."""
        source: bytes | bytearray = data
        if self._rest:
            self._rest += data
            source = self._rest
        bodies = []
        begin, num_bytes = _HEADER.size, len(source)  # of the next body; of all
        while begin <= num_bytes:
            end = begin + _body_size(source, begin - _HEADER.size)
            if end > num_bytes:
                break
            bodies.append(bytes(source[begin:end]))
            begin = end + _HEADER.size
        num_used = begin - _HEADER.size
        if source is self._rest:
            del self._rest[:num_used]
        elif num_used < num_bytes:
            self._rest += source[num_used:]
        return bodies


class FrameProtocol(asyncio.Protocol):
    """Bytes from a connection to messages on the event loop. `FrameError` closes the connection."""

    def __init__(self, receive: Callable[[bytes], object], lost: Callable[[], object]) -> None:
        self._receive = receive
        self._lost = lost
        self._frames = Frames()

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            self._receive(body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()


def write_frame(sock: socket.socket, body: bytes) -> None:
    """Blocks until all of it is sent."""
    sock.sendall(frame(body))


def read_frame(sock: socket.socket) -> bytes | None:
    """The next message; None if the other side closed the connection. Blocks. Raises `FrameError`."""
    head = _read_exactly(sock, _HEADER.size)
    if not head:
        return None
    size = _body_size(head, 0)
    body = _read_exactly(sock, size)
    if len(body) < size:
        raise FrameError(f"the connection closed after {len(body)} of {size} bytes of a message")
    return body


def _read_exactly(sock: socket.socket, size: int) -> bytes:
    """Empty, or shorter, if the other side closed the connection."""
    buffer = bytearray(size)
    num_read = 0
    with memoryview(buffer) as view:
        while num_read < size and (count := sock.recv_into(view[num_read:])):
            num_read += count
    return bytes(buffer[:num_read])


def _body_size(head: bytes | bytearray, offset: int) -> int:
    if len(head) < _HEADER.size:
        raise FrameError("the connection closed in the middle of a message's length")
    size: int = _HEADER.unpack_from(head, offset)[0]
    if size > MAX_FRAME_BYTES:
        raise FrameError(f"a message claims {size} bytes, more than {MAX_FRAME_BYTES}: the connection is corrupt")
    return size
