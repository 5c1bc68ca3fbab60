"""Server-sent events as bytes, the way OpenAI frames them: `data: <json>` and an empty line, `[DONE]` at the end.

Does: frame events to send, split received bytes into events. Does not: know what is in them (`replies.py`) or write to a
connection.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.json import Encoder

MEDIA_TYPE = "text/event-stream"
CONTENT_TYPE = f"{MEDIA_TYPE}; charset=utf-8"
DATA, END = b"data: ", b"\n\n"
DONE = b"data: [DONE]\n\n"

_encode = Encoder().encode


def event(body: Struct) -> bytes:
    # JSON has no raw line breaks, so one `data:` line always holds it.
    return b"data: %b\n\n" % _encode(body)


def split(stream: bytes) -> list[bytes]:
    """Whole events, each with the empty line that ends it, and last what is left over. Line ends: \\n, \\r\\n or \\r."""
    if b"\r" not in stream:
        *whole, tail = stream.split(END)
        return [event + END for event in whole] + [tail]
    events, start, line_start, position = [], 0, 0, 0
    while (position := _line_end(stream, position)) >= 0:
        is_pair = stream[position : position + 2] == b"\r\n"
        if stream[position] == 0x0D and position + 1 == len(stream):
            break  # the \n of a \r\n may still come
        is_blank = position == line_start
        position += 2 if is_pair else 1
        line_start = position
        if is_blank:
            events.append(stream[start:position])
            start = position
    return [*events, stream[start:]]


def _line_end(stream: bytes, start: int) -> int:
    """The next \\r or \\n; -1 if there is none, as in bytes.find."""
    ends = [end for end in (stream.find(b"\n", start), stream.find(b"\r", start)) if end >= 0]
    return min(ends, default=-1)


def payload(event: bytes) -> bytes:
    """The `data:` lines of an event, joined. Empty for a comment."""
    if event.startswith(DATA) and event.find(b"\n") >= len(event) - 2:  # one line, by far the usual case
        return event[len(DATA) :].strip()
    lines = event.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")).strip()
