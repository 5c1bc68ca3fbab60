"""Reads requests from a caller's bytes.

Does: parse with llhttp, hold the limits of head and body, refuse what RFC 9112 says to refuse. Does not: write, wait,
or know about sockets (`server.ServerConnection` does).
"""

from __future__ import annotations

from typing import Protocol

import httptools

from tonle.edge.exchange import Exchange
from tonle.edge.head import head_fault

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 256
DISCARD_BYTES = 64 * 1024**2  # of a body that is too large; then it is answered though more may come
LINE_BYTES = 4  # of a header besides its name and value


class RequestTaker(Protocol):
    """The connection above."""

    def new_exchange(self) -> Exchange: ...
    def take(self, exchange: Exchange) -> None:
        """It has been read whole."""
        ...

    def on_continue_asked(self) -> None:
        """The caller waits for leave to send its body."""
        ...

    def on_fault(self, status: int, why: str) -> None:
        """Nothing that follows can be read."""
        ...


class RequestReader:
    """Owns the parser and the request that is being read. The `on_…` methods are httptools' callbacks."""

    def __init__(self, taker: RequestTaker, *, max_body_bytes: int) -> None:
        self.incoming: Exchange | None = None  # being read
        self.done = False  # what follows is not read: something was refused, or a request was the last
        self.continue_asked = False  # and neither given nor made needless by the body
        self._taker = taker
        self._max_body_bytes = max_body_bytes
        self._parser = httptools.HttpRequestParser(self)
        self._pieces: list[bytes] = []  # of the incoming body
        self._num_bytes = 0  # of the incoming head or body
        self._num_trailer_bytes = 0
        self._num_headers = 0
        self._num_hosts = 0
        self._num_held = 0  # raw bytes the parser may hold back: of a header or trailer that has not ended
        self._num_steps = 0  # that the parser took with what was received last: began, read a head, read body
        self._head_done = False
        self._upgrade = False  # the parser stops after this head, though a body follows
        self._replaying = False
        self._url = b""

    def feed(self, data: bytes) -> None:
        is_fresh, self._num_steps = self.incoming is None, 0
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            self._pass_upgrade(data[stop.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(400, f"this is not HTTP/1.1: {error}")
        if self.incoming is not None:
            self._bound_head(len(data), is_fresh=is_fresh)

    def stop(self) -> None:
        """Read no more: what has come of the incoming request is thrown away."""
        self.done = True
        self.incoming = None
        self._pieces = []

    def on_message_begin(self) -> None:
        if self.done or self._replaying:
            return
        self._num_steps += 1
        self._head_done = self._upgrade = self.continue_asked = False
        self._num_bytes = self._num_trailer_bytes = self._num_headers = self._num_hosts = 0
        self._pieces = []
        self._url = b""
        self.incoming = self._taker.new_exchange()

    def on_url(self, url: bytes) -> None:
        if not self._replaying:
            self._url += url
            self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_done:
            self._pass_trailer(len(name) + len(value) + LINE_BYTES)
            return
        self._num_headers += 1
        self._count_head(len(name) + len(value) + LINE_BYTES)
        if self.incoming is not None:
            headers, key, text = self.incoming.headers, name.decode("latin-1").lower(), value.decode("latin-1")
            text = text.rstrip(" \t")  # the parser strips the left
            self._num_hosts += key == "host"
            headers[key] = f"{headers[key]}, {text}" if key in headers else text

    def _count_head(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > MAX_HEAD_BYTES or self._num_headers > MAX_HEADERS:
            self._refuse_head()

    def _pass_trailer(self, num_bytes: int) -> None:
        """A header after the body is dropped: it must not change what the head said of the caller."""
        if not self._replaying:
            self._num_trailer_bytes += num_bytes
            if self._num_trailer_bytes > MAX_HEAD_BYTES:
                self._refuse_head()

    def on_headers_complete(self) -> None:
        if self._replaying:
            self._replaying = False
            return
        self._head_done = True
        self._num_steps += 1
        exchange = self.incoming
        if exchange is None:
            return
        method, version = self._parser.get_method().decode("ascii"), self._parser.get_http_version()
        target = self._url.decode("ascii", "replace")
        fault = head_fault(method, version, exchange.headers, target, num_hosts=self._num_hosts)
        if fault is not None:
            self._refuse(*fault)
            return
        exchange.method = method
        exchange.http_1_0 = version == "1.0"
        closes = "close" in exchange.header("connection").lower()  # in HTTP/1.0 the parser lets keep-alive win
        exchange.keep_alive = exchange.keep_alive and not closes and self._parser.should_keep_alive()
        exchange.set_target(target)
        self._num_bytes = 0
        self._begin_body(exchange)

    def _begin_body(self, exchange: Exchange) -> None:
        declared = exchange.header("content-length")
        num_declared = int(declared) if declared else 0
        has_body = num_declared > 0 or "transfer-encoding" in exchange.headers
        waits = has_body and not exchange.http_1_0 and exchange.header("expect").lower() == "100-continue"
        self._upgrade = has_body and self._parser.should_upgrade()
        if num_declared > self._max_body_bytes:
            self._mark_oversized(exchange)
            if waits:  # nothing is under way
                self._upgrade = False
                self.on_message_complete()
        elif waits:
            self.continue_asked = True
            self._taker.on_continue_asked()

    def on_body(self, piece: bytes) -> None:
        self._num_steps += 1
        self.continue_asked = False
        exchange = self.incoming
        if exchange is None:
            return
        self._num_bytes += len(piece)
        if self._num_bytes > self._max_body_bytes:
            self._mark_oversized(exchange)
        if not exchange.oversized:
            self._pieces.append(piece)
        elif self._num_bytes > DISCARD_BYTES:
            self.on_message_complete()

    def _mark_oversized(self, exchange: Exchange) -> None:
        """Answered when the rest has been read and thrown away: closing at once would reset the connection, and a
        caller who is still sending would see that instead of the answer."""
        exchange.oversized = True
        exchange.keep_alive = False
        self._pieces.clear()

    def on_message_complete(self) -> None:
        if self._upgrade:  # `_pass_upgrade` reads its body
            return
        exchange, self.incoming = self.incoming, None
        if exchange is None:
            return
        exchange.body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces = []
        self.continue_asked = False
        self.done = not exchange.keep_alive
        self._taker.take(exchange)

    def _pass_upgrade(self, rest: bytes) -> None:
        """We speak HTTP/1.1 only: a wish for another protocol is passed over. The parser has stopped behind the head,
        so that another one goes on, told by a head of ours how the body is framed."""
        if self.done:
            return
        self._parser = httptools.HttpRequestParser(self)
        if self._upgrade and self.incoming is not None:
            self._upgrade = False
            names = ("content-length", "transfer-encoding")
            framing = "".join(
                f"{name}: {self.incoming.header(name)}\r\n" for name in names if self.incoming.header(name)
            )
            if not self.incoming.keep_alive:
                framing += "connection: close\r\n"
            self._replaying = True
            self._parser.feed_data(f"POST / HTTP/1.1\r\n{framing}\r\n".encode("latin-1"))
        if rest:
            self.feed(rest)

    def _bound_head(self, num_bytes: int, *, is_fresh: bool) -> None:
        """After each read of `num_bytes`. The parser tells of a header when it has ended; one that never ends would
        fill memory. `is_fresh`: the read did not begin within a message."""
        if not self._num_steps:
            self._num_held += num_bytes
        else:
            only_began = is_fresh and self._num_steps == 1
            self._num_held = num_bytes if only_began else 0  # else at most this one read
        if self._num_held > MAX_HEAD_BYTES:
            self._refuse_head()

    def _refuse_head(self) -> None:
        self._refuse(431, "the request's headers are too large")

    def _refuse(self, status: int, why: str) -> None:
        if not self.done:
            self.stop()
            self._taker.on_fault(status, why)
