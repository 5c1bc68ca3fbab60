"""One connection of the client: a request at a time, its answer handed on straight from the socket.

Does: write a request, parse its answer with llhttp, bound its head, time out, name failures. Does not: connect, pool or
send again (`client.py`), or bound bodies: what takes them does.

All pieces that one read brought are handed on as one: many small chunks of a fast server cost one write, and a slow
server's chunks are not delayed. No task is woken per chunk.
"""

from __future__ import annotations

import asyncio
import re
import select
import time
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from tonle.protocol.answers import Answer

# How long an idle connection is used again: less than servers keep it (uvicorn, and so vLLM: 5 s). A request sent as the
# server closes fails, and cannot be sent again: the server may have begun.
IDLE_S = 4.0

MAX_HEAD_BYTES = 64 * 1024  # of an answer: its head, and what else comes between two pieces of its body
MAX_HEADERS = 256

# Kinds of `UpstreamError` that decide what becomes of a request; the others are for people.
TIMEOUT = "timeout"
CONNECT_TIMEOUT = "connection timeout"
CLOSED = "connection closed"
TOO_LARGE = "answer too large"
OUT_OF_SOCKETS = "out of sockets"  # on this side

_KEEP_ALIVE_TIMEOUT = re.compile(r"\btimeout\s*=\s*(\d{1,6})\b", re.IGNORECASE)


class Sink(Protocol):
    """Takes an answer as it arrives. What it raises fails the exchange."""

    def attach(self, press: Callable[[bool], None]) -> None:
        """Before all: `press(True)` asks the sender to wait, `press(False)` to go on."""
        ...

    def know(self, answer: Answer) -> None:
        """Optional, between `attach` and the first `data`, by a sender in this process: what the bytes say.

        The sender keeps filling `answer` (text, usage, finish reasons, `first_s`, `complete`, an error) until `send`
        returns or raises, and sends the bytes as usual. The sink then need not parse them.
        """
        ...

    def head(self, status: int, headers: dict[str, str]) -> None: ...
    def data(self, piece: bytes) -> None: ...


class UpstreamError(Exception):
    """No full answer. `began` tells whether a part of it was handed on; `sent`, whether the server may have acted."""

    def __init__(self, kind: str, detail: str = "", *, began: bool = False, sent: bool = True) -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind
        self.began = began
        self.sent = sent

    @property
    def timed_out(self) -> bool:
        return self.kind in (TIMEOUT, CONNECT_TIMEOUT)


class ClientConnection(asyncio.Protocol):
    """One socket; carries one request at a time. The `on_…` methods are httptools' callbacks."""

    def __init__(self, idle_s: float = IDLE_S) -> None:
        """`idle_s`: how long it may be idle before it is no longer used; a server may ask for less."""
        self.reusable = False
        self._idle_s = idle_s
        self._poll: select.poll | None = None  # tells whether something has come that the event loop has not read yet
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._sink: Sink | None = None
        self._finished: asyncio.Future[None] | None = None
        self._headers: dict[str, str] = {}
        self._pieces: list[bytes] = []
        self._num_bare_bytes = 0  # that came since the last piece of a body
        self._status = 0
        self._framed = False  # the answer says where it ends
        self._complete = False
        self._keep_alive = False
        self._began = False
        self._paused = False
        self._touched_s = 0.0
        self._silence_s = 0.0  # longest allowed
        self._timer: asyncio.TimerHandle | None = None

    async def exchange(self, request: bytes, sink: Sink, *, first_s: float, silence_s: float) -> None:
        """Send, and hand the answer to `sink`. `first_s` bounds the wait for its first byte, `silence_s` later ones."""
        assert self._transport is not None, "used before it was connected"
        if self._transport.is_closing():
            raise UpstreamError(CLOSED, "before the request was sent", sent=False)
        self.reusable = self._began = self._complete = self._framed = False
        self._headers, self._status, self._sink = {}, 0, sink
        self._num_bare_bytes = 0
        self._silence_s = silence_s
        finished = self._finished = self._loop.create_future()

        def press(full: bool) -> None:
            if self._finished is finished:  # later, the connection is idle or carries another answer
                self._press(full)

        sink.attach(press)
        self._touched_s = time.monotonic()
        self._timer = self._loop.call_later(first_s, self._time_out, first_s)
        self._transport.write(request)
        try:
            await finished
        finally:
            self._timer.cancel()
            self._finished = self._sink = None
            self._press(False)

    def _press(self, full: bool) -> None:
        """The receiver of the answer is full, or has room again."""
        if self._transport is None or self._transport.is_closing() or full == self._paused:
            return
        self._paused = full
        self._touched_s = time.monotonic()
        if full:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def is_expired(self, now_s: float) -> bool:
        """It was idle for so long that the server may close it any moment."""
        return now_s - self._touched_s > self._idle_s

    @property
    def is_quiet(self) -> bool:
        """Nothing has come while it was idle: neither its end nor bytes, which could only be the end or a mistake."""
        if self._transport is None or self._transport.is_closing():
            return False
        return self._poll is None or not self._poll.poll(0)

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._touched_s = time.monotonic()
        if hasattr(select, "poll"):
            self._poll = select.poll()
            self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        if self._finished is None or self._complete:  # an answer to no request
            self.close()
            return
        self._touched_s = time.monotonic()
        self._num_bare_bytes += len(data)
        try:
            self._parser.feed_data(data)
            if self._pieces:
                self._num_bare_bytes = 0
                self._hand_on()
            elif self._num_bare_bytes > MAX_HEAD_BYTES:
                what = "between two pieces of its body" if self._began else "as its head"
                raise UpstreamError(TOO_LARGE, f"more than {MAX_HEAD_BYTES} bytes {what}", began=self._began)
        except httptools.HttpParserError as error:
            self._take_parser_error(error)
        except httptools.HttpParserUpgrade:  # which is none of those
            self._give_up(UpstreamError("unreadable answer", "it switches to another protocol", began=self._began))
        except Exception as error:  # what takes the answer failed: nothing is left to do with the rest
            self._give_up(error)
        if self._complete:
            self.reusable = self._keep_alive
            self._finish()

    def _take_parser_error(self, error: httptools.HttpParserError) -> None:
        self._keep_alive = False
        if self._complete:  # what follows a whole answer belongs to no request
            try:
                self._hand_on()
            except Exception as failure:
                self._give_up(failure)
        elif isinstance(error, httptools.HttpParserCallbackError) and isinstance(error.__context__, Exception):
            self._give_up(error.__context__)  # raised by one of the methods below
        else:
            self._give_up(UpstreamError("unreadable answer", f"not HTTP/1.1 ({error})", began=self._began))

    def _give_up(self, error: Exception) -> None:
        self._keep_alive = False
        self._fail(error)
        self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        if self._status == 200 and not self._framed and self._finished is not None:
            self._finish()
            return
        detail = str(error) if error is not None else "by the server"
        detail += "" if self._began else ", before it answered"
        self._fail(UpstreamError(CLOSED, detail, began=self._began))

    # -- httptools

    def on_message_begin(self) -> None:
        if self._complete:
            raise UpstreamError("unreadable answer", "two answers to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        if len(self._headers) > MAX_HEADERS:
            raise UpstreamError(TOO_LARGE, f"more than {MAX_HEADERS} headers")
        if self._status < 200:  # "100 Continue" and the like: the answer is still to come
            return
        self._framed = "content-length" in self._headers or "transfer-encoding" in self._headers
        self._began = True
        if self._sink is not None:
            self._sink.head(self._status, self._headers)

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        if self._status < 200:
            self._headers = {}
            return
        self._complete = True
        self._keep_alive = self._parser.should_keep_alive()  # only now: the parser forgets it with the next byte
        if (asked := self._headers.get("keep-alive")) is not None:
            self._heed(asked)

    def _heed(self, keep_alive: str) -> None:
        """`Keep-Alive: timeout=2`: the server closes it after so long."""
        if found := _KEEP_ALIVE_TIMEOUT.search(keep_alive):
            self._idle_s = min(self._idle_s, int(found.group(1)) - 1.0)

    def _hand_on(self) -> None:
        if not self._pieces:
            return
        pieces, self._pieces = self._pieces, []
        if self._sink is not None:
            self._sink.data(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def _time_out(self, waited_s: float) -> None:
        if self._finished is None:
            return
        left_s = self._touched_s + self._silence_s - time.monotonic()
        if self._began and (left_s > 0 or self._paused):  # bytes came since, or it is we who do not read
            again_s = self._silence_s if self._paused else left_s
            self._timer = self._loop.call_later(again_s, self._time_out, self._silence_s)
            return
        self._fail(UpstreamError(TIMEOUT, f"nothing came for {waited_s:g} s", began=self._began))
        self.close()

    def _finish(self) -> None:
        if self._finished is not None and not self._finished.done():
            self._finished.set_result(None)

    def _fail(self, failure: Exception) -> None:
        if self._finished is not None and not self._finished.done():
            self._finished.set_exception(failure)
