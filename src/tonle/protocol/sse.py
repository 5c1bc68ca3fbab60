"""Server-sent events as bytes, the way OpenAI frames them: `data: <json>` and an empty line, `[DONE]` at the end.

Does: frame events to send, split received bytes into events. Does not: know what is in them (`replies.py`) or write to a
connection.
"""

from __future__ import annotations

import re

from msgspec import Struct
from msgspec.json import Encoder

MEDIA_TYPE = "text/event-stream"
CONTENT_TYPE = f"{MEDIA_TYPE}; charset=utf-8"
DATA, END = b"data: ", b"\n\n"
DONE = b"data: [DONE]\n\n"
MAX_EVENT_BYTES = 8 * 1024**2  # of one event that is read: a server that sends more is at fault

_EMPTY_LINE = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")  # with the end of the line before it
_EDGE_BYTES = 3  # an empty line is found in at most 4 bytes

_encode = Encoder().encode


def event(body: Struct) -> bytes:
    # JSON has no raw line breaks, so one `data:` line always holds it.
    return b"data: %b\n\n" % _encode(body)


def split(stream: bytes) -> list[bytes]:
    """Whole events, each with the empty line that ends it, and last what is left over. Line ends: \\n, \\r\\n or \\r."""
    if b"\r" not in stream:
        *whole, tail = stream.split(END)
        return [event + END for event in whole] + [tail]
    events, start = [], 0
    for found in _EMPTY_LINE.finditer(stream):
        end = found.end()
        if end == len(stream) and stream.endswith(b"\r"):
            break  # the \n of a \r\n may still come
        events.append(stream[start:end])
        start = end
    return [*events, stream[start:]]


class EventSplitter:
    """Whole events of a stream that comes in pieces. Each byte is looked at a fixed number of times, however it is cut."""

    __slots__ = ("_edge", "_parts", "_size")

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # of an event that has not ended
        self._size = 0
        self._edge = b""  # their last bytes: an empty line may begin there

    @property
    def holding(self) -> bool:
        """A part of an event waits for its end."""
        return bool(self._parts)

    @property
    def oversized(self) -> bool:
        return self._size > MAX_EVENT_BYTES

    def push(self, piece: bytes) -> list[bytes]:
        """The events that end in `piece`."""
        if self._parts:
            seam = self._edge + piece
            if END not in seam and (b"\r" not in seam or _EMPTY_LINE.search(seam) is None):
                self._parts.append(piece)
                self._size += len(piece)
                self._edge = seam[-_EDGE_BYTES:]
                return []
            piece = self.rest() + piece
        *events, tail = split(piece)
        self._parts, self._size, self._edge = [tail] if tail else [], len(tail), tail[-_EDGE_BYTES:]
        return events

    def rest(self) -> bytes:
        """What has not ended; it is no longer held."""
        rest = b"".join(self._parts)
        self._parts, self._size, self._edge = [], 0, b""
        return rest


def payload(event: bytes) -> bytes:
    """The `data:` lines of an event, joined. Empty for a comment."""
    if event.startswith(DATA) and event.find(b"\n") >= len(event) - 2:  # one line, by far the usual case
        return event[len(DATA) :].strip()
    lines = event.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")).strip()
