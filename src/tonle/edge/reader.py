"""Reads requests from a caller's bytes.

Does: parse with llhttp, have each head checked before any of its body is kept, hold the limits of head and body, refuse
what RFC 9112 says to refuse. Does not: write, wait, or know about sockets (`connection.ServerConnection` does).
"""

from __future__ import annotations

from typing import Protocol

import httptools

from tonle.edge.exchange import Exchange
from tonle.edge.head import head_fault
from tonle.edge.held_bytes import HeldBytes
from tonle.edge.unread_body import FIRST_BYTES, UnreadBody
from tonle.errors import TonleError, TooLarge

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 256
# Of a body that is not kept. Within it, the answer comes after the body and the connection goes on; beyond it, the answer
# comes at once, the connection is closed, and what is still sent is thrown away.
PASSED_BYTES = 64 * 1024
FRAMING_SHARE = 8  # most bytes received per byte of body: a chunk of one byte, without extensions, has 6
LINE_BYTES = 4  # of a header besides its name and value
HEADER_BYTES = 160  # of memory that one takes besides, about

TOO_LARGE = "the request body is larger than this server accepts; its operator sets the limit with --max-body"
TOO_LARGE_UPLOAD = "the upload is larger than this server accepts; its operator sets the limit with --max-upload"


class RequestTaker(Protocol):
    """The connection above."""

    def new_exchange(self) -> Exchange: ...
    def check_head(self, exchange: Exchange) -> None:
        """Sets `refusal` if it is to be refused, and `wants_body`. None of its body has been read."""
        ...

    def take(self, exchange: Exchange) -> None:
        """It has been read whole, or as far as it needs to be."""
        ...

    def on_continue_asked(self) -> None:
        """The caller waits for leave to send its body."""
        ...

    def on_fault(self, status: int, why: str) -> None:
        """Nothing that follows can be read."""
        ...


class RequestReader:
    """Owns the parser and the request that is being read. The `on_…` methods are httptools' callbacks."""

    def __init__(self, taker: RequestTaker, held: HeldBytes, *, max_body_bytes: int) -> None:
        self.incoming: Exchange | None = None  # being read
        self.done = False  # what follows is not read: something was refused, or a request was the last
        self.continue_asked = False  # and neither given nor made needless by the body
        self._taker = taker
        self._held = held
        self._max_body_bytes = max_body_bytes
        self._parser = httptools.HttpRequestParser(self)
        self._body: bytes | bytearray = (
            b""  # so far; one array: the pieces of a body sent in tiny chunks would take more
        )
        self._num_head_bytes = 0
        self._num_trailer_bytes = 0
        self._num_received = 0  # received of it, all in all, in reads that did not end it
        self._num_headers = 0
        self._num_hosts = 0
        self._num_raw = 0  # bytes the parser may hold back: of a header or trailer that has not ended
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
        if self.incoming is not None:
            self._hold(self.incoming)

    def stop(self) -> None:
        """Read no more: what has come of the incoming request is thrown away."""
        self.done = True
        self._body = b""
        if self.incoming is not None:
            self._held.release(self.incoming)
            self.incoming = None

    def give_up(self, error: TonleError) -> None:
        """Refuse the incoming request, whatever the rest of it would be."""
        exchange = self.incoming
        if exchange is None:
            return
        if not self._head_done:
            self._refuse(error.status, error.message)
            return
        self._drop_body(exchange, error)
        self._hand_over_early(exchange)

    def hand_over_refused(self) -> bool:
        """If the incoming request is one, before its body has ended."""
        exchange = self.incoming
        if exchange is None or exchange.unread is None:
            return False
        self._hand_over_early(exchange)
        return True

    def on_message_begin(self) -> None:
        if self.done or self._replaying:
            return
        self._num_steps += 1
        self._head_done = self._upgrade = self.continue_asked = False
        self._num_head_bytes = self._num_trailer_bytes = self._num_headers = self._num_hosts = self._num_raw = 0
        self._num_received = 0
        self._body = self._url = b""
        self.incoming = self._taker.new_exchange()

    def on_url(self, url: bytes) -> None:
        if not self._replaying:
            self._url += url
            self._num_head_bytes += len(url)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_done:
            self._pass_trailer(len(name) + len(value) + LINE_BYTES)
            return
        self._num_headers += 1
        self._num_head_bytes += len(name) + len(value) + LINE_BYTES
        if self._num_head_bytes > MAX_HEAD_BYTES or self._num_headers > MAX_HEADERS:
            self._refuse_head()
        if self.incoming is None:
            return
        headers, key = self.incoming.headers, name.decode("latin-1").lower()
        text = value.decode("latin-1").rstrip(" \t")  # the parser strips the left
        if key == "host":
            self._num_hosts += 1
        headers[key] = f"{headers[key]}, {text}" if key in headers else text

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
        connection = exchange.headers.get("connection")  # in HTTP/1.0 the parser lets keep-alive win over close
        closes = connection is not None and "close" in connection.lower()
        exchange.keep_alive = exchange.keep_alive and not closes and self._parser.should_keep_alive()
        exchange.set_target(target)
        self._begin_body(exchange)

    def _begin_body(self, exchange: Exchange) -> None:
        num_declared = _declared(exchange)
        has_body = bool(num_declared) or "transfer-encoding" in exchange.headers
        expected = exchange.headers.get("expect")
        waits = has_body and not exchange.http_1_0 and expected is not None and expected.lower() == "100-continue"
        self._upgrade = has_body and self._parser.should_upgrade()
        self._taker.check_head(exchange)
        if exchange.refusal is None and num_declared is not None and num_declared > self._most(exchange):
            exchange.refusal = _too_large(exchange)
        if exchange.refusal is not None or (has_body and not exchange.wants_body):
            exchange.unread = UnreadBody(num_declared)
        if not waits:
            return
        if exchange.unread is not None:  # nothing is under way, and need not be
            self._hand_over_early(exchange)
        else:
            self.continue_asked = True
            self._taker.on_continue_asked()

    def on_body(self, piece: bytes) -> None:
        self._num_steps += 1
        self.continue_asked = False
        exchange = self.incoming
        if exchange is None:
            return
        if exchange.unread is not None:
            exchange.unread.add(piece)
        elif not self._body:
            self._body = piece
        else:
            if not isinstance(self._body, bytearray):
                self._body = bytearray(self._body)
            self._body += piece
        if len(self._body) > self._most(exchange):
            self._drop_body(exchange, _too_large(exchange))
        if exchange.unread is not None and exchange.unread.num_received > _most_passed(exchange.unread):
            self._hand_over_early(exchange)

    def _most(self, exchange: Exchange) -> int:
        """Bytes of its body."""
        return self._max_body_bytes if exchange.max_body_bytes is None else exchange.max_body_bytes

    def _drop_body(self, exchange: Exchange, refusal: Exception) -> None:
        """Of a request that was to be read: it is refused after all."""
        exchange.refusal = refusal
        if exchange.unread is None:
            exchange.unread = UnreadBody(_declared(exchange))
            exchange.unread.add(self._body)
        self._body = b""
        self._held.release(exchange)

    def on_message_complete(self) -> None:
        exchange = self.incoming
        if exchange is None or self._upgrade:  # `_pass_upgrade` reads its body
            return
        body = bytes(self._body)
        self._held.hold(exchange, self._num_head_bytes + self._num_headers * HEADER_BYTES + len(body))
        if self.incoming is None:  # there was no room for it
            return
        exchange.body, self._body = body, b""
        self._hand_over(exchange)

    def _hold(self, exchange: Exchange) -> None:
        num_head_bytes = self._num_head_bytes + self._num_headers * HEADER_BYTES + self._num_raw
        self._held.hold(exchange, num_head_bytes + len(self._body))

    def _hand_over(self, exchange: Exchange) -> None:
        self.incoming = None
        self.continue_asked = False
        self.done = not exchange.keep_alive
        self._taker.take(exchange)

    def _hand_over_early(self, exchange: Exchange) -> None:
        """Before its body has ended: what follows is not read."""
        exchange.keep_alive = False
        self._upgrade = False
        self._hand_over(exchange)

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
            self._num_raw += num_bytes
        else:
            only_began = is_fresh and self._num_steps == 1
            self._num_raw = num_bytes if only_began else 0  # else at most this one read
        if self._num_raw > MAX_HEAD_BYTES:
            self._refuse_head()
        self._num_received += num_bytes
        if self._num_received > FRAMING_SHARE * self._num_body_bytes() + 2 * MAX_HEAD_BYTES:
            self._refuse(400, "the request's body is almost only framing: send it in larger chunks")

    def _num_body_bytes(self) -> int:
        unread = None if self.incoming is None else self.incoming.unread
        return len(self._body) if unread is None else unread.num_received

    def _refuse_head(self) -> None:
        self._refuse(431, "the request's headers are too large")

    def _refuse(self, status: int, why: str) -> None:
        if not self.done:
            self.stop()
            self._taker.on_fault(status, why)


def _most_passed(unread: UnreadBody) -> int:
    """Of a body that is too long to be passed over, only what its record keeps is waited for."""
    return PASSED_BYTES if (unread.declared or 0) <= PASSED_BYTES else FIRST_BYTES


def _too_large(exchange: Exchange) -> TooLarge:
    return TooLarge(TOO_LARGE if exchange.max_body_bytes is None else TOO_LARGE_UPLOAD)


def _declared(exchange: Exchange) -> int | None:
    length = exchange.header("content-length")
    return int(length) if length else None
