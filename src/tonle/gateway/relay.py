"""Watch: an answer on its way from a backend to the caller.

Does: pass bytes on as they come, learn usage and text for the record, keep a copy for the cache if asked, keep a
waiting stream alive with comments. Does not: know backends, or what the record is for.

What an answer says is read from its bytes, unless the sender hands over an `Answer` that it fills itself (`know`). Sound and
pictures are passed on as they come and never read (`passed_media.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import msgspec

from tonle.edge.client import TOO_LARGE, UpstreamError
from tonle.edge.exchange import Exchange
from tonle.gateway import field_warnings
from tonle.gateway.answer_reader import AnswerReader
from tonle.gateway.backends.backend import Backend
from tonle.gateway.call import Outlet, ReplyFacts
from tonle.gateway.hops import VIA_HEADER, written
from tonle.gateway.parsed_request import ParsedRequest
from tonle.gateway.passed_media import PassedMedia, is_binary
from tonle.protocol import sse
from tonle.protocol.adapters import ADAPTER_HEADER
from tonle.protocol.answers import Answer
from tonle.protocol.errors import ErrorReply
from tonle.protocol.kv_blocks import KV_BLOCKS_HEADER
from tonle.protocol.media_paths import POOL_HEADER

PASSED_PREFIXES = ("x-tonle-", "openai-", "x-ratelimit-")
PASSED_HEADERS = (
    "retry-after", "x-queue-time", "x-prefill-time", "x-decode-time", "x-draft-tokens", "x-accepted-tokens",
)  # fmt: skip
CHAIN_HEADER = "x-tonle-chain"
FALLBACK_HEADER = "x-tonle-fallback"
REGION_HEADER = "x-tonle-region"
MAX_REGION_CHARS = 128
MAX_TIME_S = 1e6  # that an engine may say it took
_TIME_HEADERS = (("queue", "x-queue-time"), ("prefill", "x-prefill-time"), ("decode", "x-decode-time"))
MAX_ERROR_BYTES = 64 * 1024  # of a backend's error reply that are kept
MAX_COPY_BYTES = 4 * 1024**2  # of an answer for the cache
MAX_ANSWER_BYTES = 64 * 1024**2  # of an answer that is not a stream: it is held until it is complete


def _waiting() -> str:
    return "waiting"


def _working() -> str:
    return "working"


class Relay:
    """One per request; a retry begins again with `attach`. `began` = the caller has seen a part of the answer."""

    def __init__(
        self,
        exchange: Exchange,
        outlet: Outlet,
        request: ParsedRequest | None,
        facts: ReplyFacts,
        *,
        keep_alive_s: float,
    ) -> None:
        """`request` is None if it could not be read: then there is only an error to pass on."""
        self.status = 0  # of the backend's answer
        self.began = False
        self.asked = False  # the request was sent, or is being sent, to the backend of this attempt
        self.asked_s: float | None = None  # monotonic; when it was
        self.headers: dict[str, str] = {}
        self.keep_copy = False
        self.media: PassedMedia | None = None  # the answer, if it is sound or a picture
        self.hash_media = self.keep_media = False  # what the record wants of such an answer
        self.facts = facts
        self.first_byte_s: float | None = None  # monotonic
        self._exchange = exchange
        self._outlet = outlet
        self._stream = request is not None and request.stream
        self._swallow_usage = request is not None and request.adds_usage
        self._warnings = () if request is None else request.warnings
        self._reader: AnswerReader | None = None  # of what a backend says; None until it does
        self._known: Answer | None = None  # filled by the sender: the bytes are not read
        self._pieces: list[bytes] = []  # a whole answer, an error, or the copy of a stream
        self._size = 0
        self._read_whole = False
        self._started = False  # the stream's head was sent; perhaps only comments since
        self._keep_alive_s = keep_alive_s
        self._timer: asyncio.TimerHandle | None = None
        if self._stream and keep_alive_s:
            self._timer = asyncio.get_running_loop().call_later(keep_alive_s, self._comment)
        self._waiting_for: Callable[[], str] = _waiting
        self._on_begin: Callable[[], None] | None = None
        self._on_end: Callable[[], None] | None = None
        self._from_gateway = False

    def expect_begin(self, on_begin: Callable[[], None]) -> None:
        """To be called when the answer begins: with the first event of a stream, or the head of a whole answer."""
        self._on_begin = on_begin

    def expect_end(self, on_end: Callable[[], None]) -> None:
        """To be called before the end of the answer leaves: whoever has seen it may come back at once."""
        self._on_end = on_end

    def expect(self, backend: Backend, queued_s: float, waiting_for: Callable[[], str] = _working) -> None:
        """Which backend is asked now, how long the request was queued, and what a comment says meanwhile."""
        self.facts.backend, self.facts.is_local, self.facts.queued_s = backend.name, backend.local, queued_s
        self.facts.region, self._from_gateway = backend.region, backend.gateway_id is not None
        self.facts.pool = ""
        self.asked_s = None
        self._waiting_for = waiting_for

    # -- the backend's side (`Sink`)

    def attach(self, press: Callable[[bool], None]) -> None:
        self._known = None
        self.asked, self.asked_s = True, time.monotonic()
        self._exchange.on_pressure = press
        if self._exchange.full:
            press(True)

    def know(self, answer: Answer) -> None:
        """`answer` is what the bytes say; the sender keeps filling it until `send` returns."""
        self._known = answer

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        self.headers = headers
        if KV_BLOCKS_HEADER in headers and not self.facts.is_local:  # it is for this gateway, not for its caller
            self.headers = {name: value for name, value in headers.items() if name != KV_BLOCKS_HEADER}
            self.facts.kv_blocks = headers[KV_BLOCKS_HEADER]
        self.facts.pool = headers.get(POOL_HEADER, "")
        self.first_byte_s = None
        self._pieces, self._size, self._read_whole = [], 0, False
        self.media = None
        if status != 200:
            self._known = None  # an error is read from its body
        elif is_binary(headers.get("content-type")) and not self._started:
            self.media = PassedMedia(headers["content-type"], hashes=self.hash_media, keeps=self.keep_media)
        elif self._on_begin is not None and not self._stream:
            self._on_begin()
        self._reader = AnswerReader(headers.get("content-type"), swallow_usage=self._swallow_usage)

    def data(self, piece: bytes) -> None:
        if self.first_byte_s is None:
            self.first_byte_s = time.monotonic()
        if self.status != 200:
            self._keep(piece, MAX_ERROR_BYTES)
            if self._size > MAX_ANSWER_BYTES:
                raise _too_large()
            return
        if self.media is not None:
            self.media.add(piece)
            if not self.began:
                self._begin()
            self._outlet.write(piece)
            return
        if not self._stream:
            self._size += len(piece)
            if self._size > MAX_ANSWER_BYTES:
                raise _too_large()
        if self._known is None:
            piece = self._read.feed(piece)
        if not self._stream:
            self._pieces.append(piece)
            return
        if not piece:
            return
        if self.keep_copy:
            self._keep(piece, MAX_COPY_BYTES)
        if not self.began:
            if self._started:
                self._write_late_headers()
            self._begin()
            if self._warnings:
                piece = field_warnings.in_stream(piece, self._warnings)
        if self._on_end is not None and sse.DONE.strip() in piece:
            self._on_end()
        self._outlet.write(piece)

    def _write_late_headers(self) -> None:
        """Comments have been sent: what was not known then is told in one."""
        told = {ADAPTER_HEADER: self.headers.get(ADAPTER_HEADER, ""), FALLBACK_HEADER: self.facts.fallback}
        for name, value in told.items():
            if value:
                self._outlet.write(f": {name} {value}\n\n".encode())

    def _begin(self) -> None:
        self.began = True
        self._stop_timer()
        if self._on_begin is not None:
            self._on_begin()
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
            return
        if self.media is not None:
            self.media.complete = True
            self.start_stream()
            self._outlet.end()
            return
        if self._on_end is not None:
            self._on_end()
        if not self._stream:
            content_type = self.headers.get("content-type", "application/json")
            self.began = True
            self._reply_whole(b"".join(self._pieces), content_type)
        else:
            self.start_stream()
            rest = self._read.rest() if self._known is None else b""
            if self.keep_copy and rest:
                self._keep(rest, MAX_COPY_BYTES)
            self._outlet.write(rest)
            self._outlet.end()

    def _reply_whole(self, body: bytes, content_type: str) -> None:
        if self._warnings:
            body = field_warnings.in_whole(body, self._warnings)
        self._outlet.reply(body, content_type=content_type, headers=self._reply_headers())

    def _finish_error(self) -> None:
        body = b"".join(self._pieces)
        if self._started:
            self._outlet.write(b"data: %b\n\n" % b" ".join(body.split(b"\n")))
            self._outlet.end()
        else:
            content_type = self.headers.get("content-type", "application/json")
            headers = self._reply_headers(self.status)
            self._outlet.reply(body, status=self.status, content_type=content_type, headers=headers)

    def replay(self, body: bytes, content_type: str, *, adapter: str = "") -> None:
        """An answer that was given before. `adapter`: as the header of that answer named it."""
        self._stop_timer()
        self.headers = {"content-type": content_type} | ({ADAPTER_HEADER: adapter} if adapter else {})
        self.status = 200
        self.began = True
        self._known = None
        self._reader = AnswerReader(content_type)
        self._reader.feed(body)
        if self._on_end is not None:
            self._on_end()
        if not self._stream:
            self._reply_whole(body, content_type)
            return
        self.start_stream()
        self._outlet.write(field_warnings.in_stream(body, self._warnings) if self._warnings else body)
        self._outlet.end()

    def fail(self, error: ErrorReply) -> None:
        """As a status while there is one to set, as an event in a stream that has begun. Sound that broke off is left without
        its end: the connection is closed, and the caller cannot take it for the whole."""
        self._stop_timer()
        if self.media is not None and self.began:
            return
        if self._started:
            self._outlet.write(sse.event(error.body))
            self._outlet.end()
        else:
            own = [*error.headers, *self._reply_headers(error.status)]
            self._outlet.reply(msgspec.json.encode(error.body), status=error.status, headers=own)

    def close(self) -> None:
        """However it ended."""
        self._stop_timer()
        self._exchange.on_pressure = None

    def _comment(self) -> None:
        self.start_stream()
        self._outlet.write(f": {self._waiting_for()}\n\n".encode())
        self._timer = asyncio.get_running_loop().call_later(self._keep_alive_s, self._comment)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def region(self) -> str | None:
        """Where the answer was made: as a gateway that was asked tells, or where the backend is."""
        told = self.headers.get(REGION_HEADER, "")[:MAX_REGION_CHARS] if self._from_gateway else ""
        return told or self.facts.region

    def _reply_headers(self, status: int = 200) -> list[tuple[str, str]]:
        facts = self.facts
        headers = [("x-process-time", f"{self._exchange.elapsed_s:.6f}"), ("x-cache", facts.cache_state)]
        if facts.backend and not facts.is_local:
            headers += [("x-tonle-backend", facts.backend), ("x-tonle-queue-time", f"{facts.queued_s:.6f}")]
            if (region := self.region) is not None:
                headers.append((REGION_HEADER, region))
        if facts.fallback:
            headers.append((FALLBACK_HEADER, facts.fallback))
        if status >= 500 and facts.passed:  # for the gateway that asks: none of these needs to be tried again
            headers.append((VIA_HEADER, written(facts.passed)))
        if facts.chain_id:
            headers.append((CHAIN_HEADER, facts.chain_id))
        theirs = self.headers.get(field_warnings.HEADER, "")
        if self._warnings or theirs:
            headers.append((field_warnings.HEADER, field_warnings.header(self._warnings, theirs)))
        said = {name for name, _ in headers}
        for name, value in self.headers.items():
            if name in said or name in (field_warnings.HEADER, VIA_HEADER):
                continue
            if name in PASSED_HEADERS or name.startswith(PASSED_PREFIXES):
                headers.append((name, value))
        return headers

    # -- what was learned

    @property
    def copy(self) -> bytes | None:
        """The whole answer, if it was kept and is one: not a stream that broke off or ended with an error."""
        if self.status != 200 or not self._pieces:
            return None
        answer = self.peek() if self._known is not None or not self._stream else self._read.finish()
        return b"".join(self._pieces) if answer.complete and answer.error is None else None

    @property
    def _read(self) -> AnswerReader:
        if self._reader is None:
            self._reader = AnswerReader(None)
        return self._reader

    def peek(self) -> Answer:
        """As far as it came. Of an answer that is not a stream, all or nothing."""
        if self.media is not None:
            return Answer(complete=self.media.complete)
        if self._known is not None:
            return self._known
        if self.status == 200 and not self._stream and not self._read_whole:
            self._read_whole = True
            answer = self._read.finish()
            if "x-prefill-time" in self.headers:
                answer.engine_s = engine_times(self.headers)
        return self._read.answer

    def answer(self) -> Answer:
        """What the caller was told, as far as it came. Once, at the end."""
        if self.media is not None:
            return self.media.answer()
        if self._known is not None:
            self._known.finish()
            return self._known
        if self.status == 200 and not self._stream:
            return self.peek()
        if self.status != 200:
            for piece in self._pieces:
                self._read.feed(piece)
        return self._read.finish()


def _too_large() -> UpstreamError:
    advice = "ask for less at once, or for a stream"
    return UpstreamError(TOO_LARGE, f"more than {MAX_ANSWER_BYTES} bytes; {advice}", began=True)


def engine_times(headers: dict[str, str]) -> dict[str, float] | None:
    """Where an engine's time went, seconds, as a Tonle replica tells it with a whole answer; None if it does not."""
    found: dict[str, float] = {}
    for name, header in _TIME_HEADERS:
        if (text := headers.get(header)) is not None:
            with contextlib.suppress(ValueError):
                seconds = float(text)
                if 0 <= seconds < MAX_TIME_S:
                    found[name] = seconds
    return found or None
