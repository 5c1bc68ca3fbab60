"""Watch: an answer on its way from a backend to the caller.

Does: pass bytes on as they come, learn usage and text for the record, keep a copy for the cache if asked, keep a
waiting stream alive with comments. Does not: know backends, or what the record is for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from tonle.gateway import field_warnings
from tonle.gateway.answer_reader import AnswerReader
from tonle.gateway.call import Call
from tonle.gateway.outlet import Outlet
from tonle.protocol import sse
from tonle.protocol.answers import Answer
from tonle.protocol.errors import ErrorReply

PASSED_PREFIXES = ("x-tonle-", "openai-", "x-ratelimit-")
PASSED_HEADERS = ("retry-after", "x-queue-time", "x-prefill-time", "x-decode-time")
MAX_ERROR_BYTES = 64 * 1024  # of a backend's error reply that are kept
MAX_COPY_BYTES = 4 * 1024**2  # of an answer for the cache


class Relay:
    """One per request; a retry begins again with `head`. `began` = the caller has seen a part of the answer."""

    def __init__(self, call: Call, outlet: Outlet, *, keep_alive_s: float) -> None:
        self.status = 0  # of the backend's answer
        self.began = False
        self.headers: dict[str, str] = {}
        self.keep_copy = False
        self._call = call
        self._outlet = outlet
        self._tap = AnswerReader(None)
        self._pieces: list[bytes] = []  # a whole answer, an error, or the copy of a stream
        self._size = 0
        self._read_whole = False
        self._started = False  # the stream's head was sent; perhaps only comments since
        self._keep_alive_s = keep_alive_s
        self._timer: asyncio.TimerHandle | None = None
        if call.stream and keep_alive_s:
            self._timer = asyncio.get_running_loop().call_later(keep_alive_s, self._comment)
        self.waiting_for: Callable[[], str] = lambda: "waiting"  # what a comment says

    # -- the backend's side (`Sink`)

    def attach(self, press: Callable[[bool], None]) -> None:
        exchange = self._call.exchange
        exchange.on_pressure = press
        if exchange.full:
            press(True)

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        self.headers = headers
        self._pieces, self._size, self._read_whole = [], 0, False
        self._tap = AnswerReader(headers.get("content-type"), swallow_usage=self._call.asks_usage)

    def data(self, piece: bytes) -> None:
        call = self._call
        if call.first_byte_s is None:
            call.first_byte_s = time.monotonic()
        if self.status != 200:
            self._keep(piece, MAX_ERROR_BYTES)
            return
        piece = self._tap.feed(piece)
        if not call.stream:
            self._pieces.append(piece)
            return
        if not piece:
            return
        if self.keep_copy:
            self._keep(piece, MAX_COPY_BYTES)
        if not self.began:
            self._begin()
            if call.warnings:
                piece = field_warnings.in_stream(piece, call.warnings)
        self._outlet.write(piece)

    def _begin(self) -> None:
        self.began = True
        self._stop_timer()
        self.start_stream()

    def _keep(self, piece: bytes, limit: int) -> None:
        self._size += len(piece)
        if self._size <= limit:
            self._pieces.append(piece)
        else:
            self._pieces.clear()

    # -- the caller's side

    def start_stream(self) -> None:
        if not self._started:
            self._started = True
            content_type = self.headers.get("content-type") or sse.CONTENT_TYPE
            own = [("cache-control", "no-cache"), ("x-accel-buffering", "no")]
            self._outlet.start(content_type=content_type, headers=[*own, *self._reply_headers()])

    def finish(self) -> None:
        """The backend has said all: so have we. A backend's error is passed on as it is."""
        self._stop_timer()
        if self.status != 200:
            self._finish_error()
        elif not self._call.stream:
            content_type = self.headers.get("content-type", "application/json")
            self.began = True
            self._reply_whole(b"".join(self._pieces), content_type)
        else:
            self.start_stream()
            rest = self._tap.rest()
            if self.keep_copy and rest:
                self._keep(rest, MAX_COPY_BYTES)
            self._outlet.write(rest)
            self._outlet.end()

    def _reply_whole(self, body: bytes, content_type: str) -> None:
        if self._call.warnings:
            body = field_warnings.in_whole(body, self._call.warnings)
        self._outlet.reply(body, content_type=content_type, headers=self._reply_headers())

    def _finish_error(self) -> None:
        body = b"".join(self._pieces)
        if self._started:
            self._outlet.write(b"data: %b\n\n" % b" ".join(body.split(b"\n")))
            self._outlet.end()
        else:
            content_type = self.headers.get("content-type", "application/json")
            self._outlet.reply(body, status=self.status, content_type=content_type, headers=self._reply_headers())

    def replay(self, body: bytes, content_type: str) -> None:
        """An answer that was given before."""
        self._stop_timer()
        self.status = 200
        self.began = True
        self._tap = AnswerReader(content_type)
        self._tap.feed(body)
        if not self._call.stream:
            self._reply_whole(body, content_type)
            return
        self.headers = {"content-type": content_type}
        self.start_stream()
        self._outlet.write(field_warnings.in_stream(body, self._call.warnings) if self._call.warnings else body)
        self._outlet.end()

    def fail(self, error: ErrorReply) -> None:
        """As a status while there is one to set, as an event in a stream that has begun."""
        self._stop_timer()
        if self._started:
            self._outlet.write(sse.event(error.body))
            self._outlet.end()
        else:
            own = [*error.headers, *self._reply_headers()]
            self._outlet.reply(msgspec.json.encode(error.body), status=error.status, headers=own)

    def close(self) -> None:
        """However it ended."""
        self._stop_timer()
        self._call.exchange.on_pressure = None

    def _comment(self) -> None:
        self.start_stream()
        self._outlet.write(f": {self.waiting_for()}\n\n".encode())
        self._timer = asyncio.get_running_loop().call_later(self._keep_alive_s, self._comment)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _reply_headers(self) -> list[tuple[str, str]]:
        call = self._call
        headers = [("x-process-time", f"{call.exchange.elapsed_s:.6f}"), ("x-cache", call.cache_state)]
        if call.backend:
            headers += [("x-tonle-backend", call.backend), ("x-tonle-queue-time", f"{call.queued_s:.6f}")]
        theirs = self.headers.get(field_warnings.HEADER, "")
        if call.warnings or theirs:
            headers.append((field_warnings.HEADER, field_warnings.header(call.warnings, theirs)))
        for name, value in self.headers.items():
            if name != field_warnings.HEADER and (name in PASSED_HEADERS or name.startswith(PASSED_PREFIXES)):
                headers.append((name, value))
        return headers

    # -- what was learned

    @property
    def copy(self) -> bytes | None:
        """The whole answer, if it was kept and is one: not a stream that broke off or ended with an error."""
        if self.status != 200 or not self._pieces:
            return None
        answer = self._tap.finish() if self._call.stream else self.peek()
        return b"".join(self._pieces) if answer.complete and answer.error is None else None

    @property
    def retry_after_s(self) -> float:
        text = self.headers.get("retry-after", "")
        return float(text) if text.isdecimal() else 1.0

    def peek(self) -> Answer:
        """As far as it came. Of an answer that is not a stream, all or nothing."""
        if self.status == 200 and not self._call.stream and not self._read_whole:
            self._read_whole = True
            self._tap.finish()
        return self._tap.answer

    def answer(self) -> Answer:
        """What the caller was told, as far as it came. Once, at the end."""
        if self.status == 200 and not self._call.stream:
            return self.peek()
        if self.status != 200:
            for piece in self._pieces:
                self._tap.feed(piece)
        return self._tap.finish()
