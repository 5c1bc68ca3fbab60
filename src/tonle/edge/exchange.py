"""One request of a caller and the reply to it.

Does: hold what was asked, frame what is answered (whole or chunked), say whether the caller keeps up or is gone.
Does not: touch sockets (`server.ServerConnection` does) or know what is asked.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, Protocol

from tonle.edge.head import absolute_target, decoded
from tonle.edge.unread_body import UnreadBody
from tonle.protocol.random_ids import random_hex

JSON = "application/json"
EVENT_STREAM = "text/event-stream"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# Part of a path, in which browsers and proxies resolve `.` and `..`.
SANE_ID = re.compile(r"(?!\.\.?$)[A-Za-z0-9._:\-]{1,128}")

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_BODILESS = (204, 304)
_UNSENDABLE = re.compile(r"[\x00-\x1f\x7f]+")  # in a header: a line end would begin another one

Headers = Iterable[tuple[str, str]]


class Line(Protocol):
    """The connection below."""

    def send(self, data: bytes) -> None: ...
    def finish(self, exchange: Exchange) -> None:
        """The reply is complete."""
        ...

    @property
    def full(self) -> bool:
        """The caller reads more slowly than we write."""
        ...

    async def drained(self) -> None: ...

    @property
    def retiring(self) -> bool:
        """The server is being stopped."""
        ...

    def ends_with(self, exchange: Exchange) -> bool:
        """While it is: nothing more is answered after `exchange`."""
        ...


class Exchange:
    """Owns one reply. `write` never waits: a producer that may be faster than the caller reads watches `full`."""

    # Of the class, so that they cost nothing where there is nothing to tell. For the log:
    problem: str | None = None  # why it failed
    tokens: tuple[int, int] | None = None  # of the prompt and of the answer
    trace: Any = None  # the W3C trace it belongs to: a `TraceContext`, set when its work begins
    # From the check of the head:
    key: Any = None  # the caller's API key
    forwarded_https = False  # a trusted proxy says that its caller used HTTPS
    refusal: Exception | None = None  # to be answered with this; its body is not kept
    wants_body = True  # False: its body, if it has one, is not kept either
    max_body_bytes: int | None = None  # None: the server's
    unread: UnreadBody | None = None  # what is known of a body that is not kept
    num_held = 0  # bytes of it in memory, as `HeldBytes` counts them

    def __init__(self, line: Line, *, client: str, loopback: bool) -> None:
        self.method = ""
        self.path = ""  # decoded, without the query
        self.query = ""
        self.headers: dict[str, str] = {}  # names in lower case; repeated ones joined by commas
        self.body = b""
        self.arrived_s = time.monotonic()
        self.started_s = 0.0  # when the reply began; 0 until then
        self.status = 0  # 0 until the reply begins
        self.ended = False
        self.gone: str | None = None  # why the rest of the reply is no longer wanted
        self.keep_alive = True
        self.http_1_0 = False
        self.client = client  # the caller's address; empty if it has none
        self.loopback = loopback  # the caller is on this machine
        self.extra_headers: list[tuple[str, str]] = []  # of every reply, whatever writes it
        self.on_pressure: Callable[[bool], None] | None = None  # told when `full` changes
        self._line = line
        self._head = b""  # all but its last lines; waits for the first piece of the body: one write instead of two
        self._chunked = False
        self._is_event_stream = False
        self._between_events = False  # what was written of an event stream ends where an event does
        self._bodiless = False  # the reply has a head only
        self._request_id = ""

    # -- what was asked

    def header(self, name: str) -> str:
        """Empty if absent."""
        return self.headers.get(name, "")

    def set_target(self, target: str) -> None:
        whole = absolute_target(target) if target[:1] != "/" and "://" in target else None
        if whole is not None:  # its host counts, not the header's
            self.headers["host"], self.path, self.query = whole
            return
        path, _, self.query = target.partition("?")
        self.path = decoded(path)

    @property
    def request_id(self) -> str:
        """The caller's, if it is one that can be logged and sent on; else ours."""
        if not self._request_id:
            theirs = self.headers.get("x-request-id", "")
            sane = theirs and SANE_ID.fullmatch(theirs)
            self._request_id = theirs if sane else f"req-{random_hex(12)}"
        return self._request_id

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.arrived_s

    # -- what is answered

    def reply(self, body: bytes, *, status: int = 200, content_type: str = JSON, headers: Headers = ()) -> None:
        """The whole reply at once."""
        self._begin(status, content_type, headers, f"content-length: {len(body)}\r\n")
        head = self._take_head()
        self._line.send(head if self._bodiless else head + body)
        self._end()

    def start(self, *, status: int = 200, content_type: str, headers: Headers = ()) -> None:
        """Begin a reply whose length is not known. Nothing leaves before the first `write`."""
        self._chunked = not self.http_1_0
        self._between_events = content_type.startswith(EVENT_STREAM)
        self._is_event_stream = self._between_events
        if self.http_1_0:
            self.keep_alive = False  # only the end of the connection ends the body
        self._begin(status, content_type, headers, "transfer-encoding: chunked\r\n" if self._chunked else "")
        self._chunked = self._chunked and not self._bodiless

    def write(self, piece: bytes) -> None:
        if not piece or self._bodiless:
            return
        if self._is_event_stream:
            self._between_events = piece.endswith(b"\n\n")
        if self._chunked:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        if self._head:
            piece = self._take_head() + piece
        self._line.send(piece)

    def probe(self) -> bool:
        """Write what means nothing to the caller, so that a closed socket answers: between events a comment, elsewhere in
        a stream a zero before the length of the next chunk. False: not possible now."""
        if self.ended:
            return False
        if self._between_events:
            self.write(b":\n\n")
            return True
        if self._chunked and self.head_sent:
            self._line.send(b"0")  # RFC 9112, section 7.1: of hexadecimal digits there may be more than are needed
            return True
        return False

    def end(self) -> None:
        last = b"0\r\n\r\n" if self._chunked else b""
        if data := self._take_head() + last if self._head else last:
            self._line.send(data)
        self._end()

    @property
    def head_sent(self) -> bool:
        return bool(self.status) and not self._head

    @property
    def full(self) -> bool:
        return self._line.full

    async def drained(self) -> None:
        await self._line.drained()

    def _begin(self, status: int, content_type: str, headers: Headers, framing: str) -> None:
        assert not self.status, "a reply begins once"
        self.status = status
        self.started_s = time.monotonic()
        self._bodiless = status in _BODILESS or self.method == "HEAD"
        if status in _BODILESS:
            content_type, framing = "", ""
        pairs = [("x-request-id", self.request_id), *headers, *self.extra_headers]
        if content_type:
            pairs.insert(0, ("content-type", content_type))
        if not "".join([name + value for name, value in pairs]).isprintable():
            pairs = [(_sendable(name), _sendable(value)) for name, value in pairs]
        lines = [f"{name}: {value}\r\n" for name, value in pairs]
        lines.append(framing)
        status_line = _STATUS_LINES.get(status) or f"HTTP/1.1 {status} -\r\n".encode()
        self._head = status_line + "".join(lines).encode("latin-1", "replace")

    def _take_head(self) -> bytes:
        """The head, which now leaves: only now is it known whether the connection goes on after this answer."""
        head, self._head = self._head, b""
        if self.keep_alive and self._line.retiring and self._line.ends_with(self):
            self.keep_alive = False
        if not self.keep_alive:
            return head + b"connection: close\r\n\r\n"
        return head + (b"connection: keep-alive\r\n\r\n" if self.http_1_0 else b"\r\n")

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            self._line.finish(self)


def _sendable(text: str) -> str:
    return text if text.isprintable() else _UNSENDABLE.sub(" ", text)
