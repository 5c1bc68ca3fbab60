"""Media between two processes: memory that both map, without a name in the file system.

Does: put the large media of one message into one segment, pass its descriptor, map it. Does not: copy what is in it into
messages, or free anything by hand: a segment is gone when neither process maps it any more, however they ended.

A segment is a memfd (elsewhere than on Linux: a file without a name). Its descriptor travels over a socket beside the one for
messages, one byte with each, before the message that speaks of it: whoever reads the message finds the descriptor there.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from collections.abc import Sequence

import msgspec

from tonle.workers.kind import Media

INLINE_BYTES = 4096  # smaller media travel in the message itself
_ALIGN = 64  # so that vectors can be read in place


class Span(msgspec.Struct, array_like=True, frozen=True):
    """A place in the message's segment. Bytes."""

    offset: int
    length: int


Carried = bytes | Span  # one piece of media, as a message has it


class Packer:
    """The media of one message."""

    def __init__(self) -> None:
        self.num_bytes = 0  # of the segment; 0: there is none
        self._large: list[tuple[int, memoryview]] = []  # offsets and what is there

    def pack(self, media: Sequence[Media]) -> list[Carried]:
        """What the message has in place of `media`. Raises `TypeError` if one is not bytes."""
        carried: list[Carried] = []
        for one in media:
            view = memoryview(one).cast("B")
            if len(view) < INLINE_BYTES:
                carried.append(bytes(view))
                continue
            offset = -(-self.num_bytes // _ALIGN) * _ALIGN
            self._large.append((offset, view))
            self.num_bytes = offset + len(view)
            carried.append(Span(offset, len(view)))
        return carried

    def send(self, sock: socket.socket) -> None:
        """The segment, if there is one. Call it before the message is sent. Raises `OSError`."""
        if not self.num_bytes:
            return
        descriptor = _new_segment()
        try:
            os.truncate(descriptor, self.num_bytes)
            for offset, view in self._large:
                _write(descriptor, offset, view)
            socket.send_fds(sock, [b"m"], [descriptor])
        finally:
            os.close(descriptor)
            self._large.clear()


class Segment:
    """What a message's media are in, on the other side. Views keep it mapped."""

    def __init__(self, sock: socket.socket, num_bytes: int) -> None:
        """Takes the next descriptor from `sock`, unless `num_bytes` is 0. Raises `OSError`."""
        self._view = memoryview(b"")
        if not num_bytes:
            return
        _, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
        if not descriptors:
            raise ConnectionError("a message speaks of media, and none came with it")
        try:
            self._view = memoryview(mmap.mmap(descriptors[0], num_bytes, access=mmap.ACCESS_READ))
        finally:
            os.close(descriptors[0])

    def unpack(self, carried: Sequence[Carried]) -> tuple[Media, ...]:
        """Read-only."""
        return tuple(
            one if isinstance(one, bytes) else self._view[one.offset : one.offset + one.length] for one in carried
        )


def _new_segment() -> int:
    """A descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("tonle-media")
    with tempfile.TemporaryFile(prefix="tonle-media") as file:
        return os.dup(file.fileno())


def _write(descriptor: int, offset: int, view: memoryview) -> None:
    while view:
        num_written = os.pwrite(descriptor, view, offset)
        view, offset = view[num_written:], offset + num_written
