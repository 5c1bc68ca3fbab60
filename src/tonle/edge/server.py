"""The server: connections of callers, one request at a time on each, and an orderly end.

Does: parse with llhttp, hold limits (head, body, time), start one task per request, cancel it when its caller hangs
up, drain. Does not: route or answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

import httptools

from tonle.edge.exchange import Exchange
from tonle.telemetry.logs import one_line

log = logging.getLogger("tonle.edge")

MAX_HEAD_BYTES = 64 * 1024
MAX_PIPELINED = 8  # requests of one connection that wait for the one before; more are not read
WRITE_BUFFER_BYTES = 256 * 1024  # per caller; above it, whoever produces the answer is asked to wait
DISCARD_BYTES = 64 * 1024**2  # of a body that is too large; then it is answered though more may come
POLL_S = 0.02  # while draining
ABORT_GRACE_S = 1.0  # for requests that were ended to close their records and say so
SWEEP_S = 2.0  # how often connections are looked over for timeouts

CALLER_HUNG_UP = "the caller hung up"
CALLER_STALLED = "the caller stopped reading"
SHUTTING_DOWN = "the server is shutting down"

Handle = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    max_body_bytes: int = 8 * 1024**2
    read_timeout_s: float = 60.0  # from the first byte of a request to its last
    idle_timeout_s: float = 75.0  # longer than load balancers keep idle connections, so that they close them
    write_timeout_s: float = 60.0  # a caller who reads nothing for this long is given up


class ServerConnection(asyncio.Protocol):
    """A caller's socket. The `on_…` methods are httptools' callbacks."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._incoming: Exchange | None = None  # being read
        self._queue: deque[Exchange] = deque()  # read, not begun: an earlier one is being answered
        self._active: Exchange | None = None
        self._task: asyncio.Task[None] | None = None
        self._pieces: list[bytes] = []  # of the incoming body
        self._num_bytes = 0  # of the incoming head or body
        self._num_trailer_bytes = 0
        self._num_held = 0  # raw bytes the parser may hold back: of a header or trailer that has not ended
        self._num_steps = 0  # that the parser took with what was received last: began, read a head, read body
        self._head_done = False
        self._url = b""
        self._client = ""  # address of the other end
        self._loopback = False
        self._closing = False
        self._drain_waiters: list[asyncio.Future[None]] = []
        self._unsent: list[bytes] = []
        self.full = False
        self.full_since_s = 0.0
        self.touched_s = time.monotonic()  # last moment it was not idle

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        peer = transport.get_extra_info("peername")
        self._client = str(peer[0]) if peer else ""
        self._loopback = not peer or self._client.startswith(("127.", "::1"))
        self._server.connections.add(self)

    def data_received(self, data: bytes) -> None:
        self.touched_s = self._server.now_s
        is_fresh, self._num_steps = self._incoming is None, 0
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # we speak HTTP/1.1 only: the request is answered, the wish is not
            if self._active is not None:
                self._active.keep_alive = False
        except httptools.HttpParserError as error:
            self._refuse(400, f"this is not HTTP/1.1: {error}")
        if self._incoming is not None:
            self._bound_head(len(data), is_fresh=is_fresh)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        self._closing = True
        self._release_waiters()
        self._queue.clear()
        if self._active is not None:
            self.drop(CALLER_HUNG_UP)

    def pause_writing(self) -> None:
        self.full = True
        self.full_since_s = time.monotonic()
        if self._active is not None and self._active.on_pressure is not None:
            self._active.on_pressure(True)

    def resume_writing(self) -> None:
        self.full = False
        self._release_waiters()
        if self._active is not None and self._active.on_pressure is not None:
            self._active.on_pressure(False)

    # -- httptools

    def on_message_begin(self) -> None:
        if self._closing:  # sent after something that was refused
            return
        self._num_steps += 1
        self._head_done = False
        self._num_trailer_bytes = 0
        self._incoming = Exchange(self, client=self._client, loopback=self._loopback)
        self._pieces = []
        self._num_bytes = 0
        self._url = b""

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._num_bytes += len(url)
        if self._num_bytes > MAX_HEAD_BYTES:
            self._refuse_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_done:
            self._pass_trailer(len(name) + len(value))
            return
        self._num_bytes += len(name) + len(value)
        if self._num_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        if self._incoming is not None:
            headers, key, text = self._incoming.headers, name.decode("latin-1").lower(), value.decode("latin-1")
            headers[key] = f"{headers[key]}, {text}" if key in headers else text

    def _pass_trailer(self, num_bytes: int) -> None:
        """A header after the body is dropped: it must not change what the head said of the caller."""
        self._num_trailer_bytes += num_bytes
        if self._num_trailer_bytes > MAX_HEAD_BYTES:
            self._refuse_head()

    def on_headers_complete(self) -> None:
        self._head_done = True
        self._num_steps += 1
        exchange = self._incoming
        if exchange is None:
            return
        exchange.method = self._parser.get_method().decode("ascii")
        exchange.http_1_0 = self._parser.get_http_version() == "1.0"
        exchange.keep_alive = self._parser.should_keep_alive() and not self._server.draining
        exchange.set_target(self._url.decode("ascii", "replace"))
        self._num_bytes = 0
        declared, waits = exchange.header("content-length"), exchange.header("expect").lower() == "100-continue"
        if declared.isdecimal() and int(declared) > self._server.limits.max_body_bytes:
            self._mark_oversized(exchange)
            if waits:  # nothing is under way
                self.on_message_complete()
        elif waits and self._active is None:
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, piece: bytes) -> None:
        self._num_steps += 1
        exchange = self._incoming
        if exchange is None:
            return
        self._num_bytes += len(piece)
        if self._num_bytes > self._server.limits.max_body_bytes:
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
        exchange, self._incoming = self._incoming, None
        if exchange is None:
            return
        exchange.body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces = []
        if self._active is None:
            self._begin(exchange)
            return
        self._queue.append(exchange)
        if len(self._queue) >= MAX_PIPELINED and self._transport is not None:
            self._transport.pause_reading()

    # -- one request after the other

    def _begin(self, exchange: Exchange) -> None:
        self._active = exchange
        self._task = self._loop.create_task(self._run(exchange))

    async def _run(self, exchange: Exchange) -> None:
        try:
            await self._server.handle(exchange)
        except asyncio.CancelledError:
            if not exchange.gone:
                raise
        except Exception:
            log.exception("%s %s failed, id %s", exchange.method, one_line(exchange.path), exchange.request_id)
        if not exchange.ended:  # a handler that gave up in the middle: the caller must not take that for the end
            self.close()

    def finish(self, exchange: Exchange) -> None:
        """The reply to `exchange` is complete: the next one may begin."""
        self._active = None
        self._server.num_answered += 1
        self.touched_s = time.monotonic()
        if not exchange.keep_alive or self._server.draining:
            self.close()
        elif self._queue:
            following = self._queue.popleft()
            if self._transport is not None and not self._transport.is_reading():
                self._transport.resume_reading()
            self._loop.call_soon(self._begin_next, following)

    def _begin_next(self, exchange: Exchange) -> None:
        if not self._closing:
            self._begin(exchange)

    def drop(self, why: str) -> bool:
        """End the request under way: nobody waits for it. True if there was one, and it had not been ended before."""
        if self._active is None:
            return False
        is_first = not self._active.gone
        self._active.gone = self._active.gone or why
        if self._task is not None:
            self._task.cancel()
        return is_first

    # -- writing

    def send(self, data: bytes) -> None:
        """Leaves with everything else of this turn of the event loop, in one write."""
        if not self._closing:
            if not self._unsent:
                self._server.flush_soon(self)
            self._unsent.append(data)

    def flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and self._transport is not None and not self._transport.is_closing():
            self._transport.write(unsent[0] if len(unsent) == 1 else b"".join(unsent))

    async def drained(self) -> None:
        if self.full and not self._closing:
            waiter = self._loop.create_future()
            self._drain_waiters.append(waiter)
            await waiter

    def _release_waiters(self) -> None:
        waiters, self._drain_waiters = self._drain_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def close(self) -> None:
        """After what was written has left."""
        if not self._closing and self._transport is not None:
            self.flush()
            self._closing = True
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- limits

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
        """Not a request at all: answered here, without a handler."""
        if self._active is None and not self._closing:
            exchange = Exchange(self, client=self._client, loopback=self._loopback)
            exchange.keep_alive = False
            self._active = exchange
            body = '{"error":{"message":"%s","type":"invalid_request_error","param":null,"code":null}}'
            exchange.reply((body % why.replace('"', "'").replace("\\", "/")).encode(), status=status)
        self._incoming = None
        self.close()

    @property
    def idle(self) -> bool:
        return self._active is None and not self._queue

    def sweep(self, now_s: float) -> None:
        """Close what has been idle, has not finished its request, or has not read, for too long."""
        limits = self._server.limits
        if self._incoming is not None and now_s - self._incoming.arrived_s > limits.read_timeout_s:
            self._refuse(408, "the request did not arrive in time")
        elif self.idle and self._incoming is None and now_s - self.touched_s > limits.idle_timeout_s:
            self.close()
        elif self.full and now_s - self.full_since_s > limits.write_timeout_s:
            self.drop(CALLER_STALLED)
            self.abort()


class HttpServer:
    """Owns the listening socket and every connection made to it."""

    def __init__(self, handle: Handle, limits: ServerLimits) -> None:
        self.handle = handle
        self.limits = limits
        self.connections: set[ServerConnection] = set()
        self.draining = False
        self.num_answered = 0
        self.now_s = time.monotonic()  # as of the last sweep
        self._server: asyncio.Server | None = None
        self.num_cut = 0  # requests that a shutdown has ended
        self._sweeper: asyncio.Task[None] | None = None
        self._unflushed: list[ServerConnection] = []

    async def start(self, listener: socket.socket, *, tls: ssl.SSLContext | None = None) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: ServerConnection(self), sock=listener, ssl=tls, backlog=2048)
        self._sweeper = asyncio.create_task(self._sweep())

    def flush_soon(self, connection: ServerConnection) -> None:
        if not self._unflushed:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unflushed.append(connection)

    def _flush(self) -> None:
        connections, self._unflushed = self._unflushed, []
        for connection in connections:
            connection.flush()

    @property
    def num_active(self) -> int:
        return sum(not connection.idle for connection in self.connections)

    async def stop(self, *, drain_s: float) -> None:
        """Take nothing new, let what runs finish for `drain_s`, then end it."""
        self.draining = True
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            if connection.idle:
                connection.close()
        await self._wait_idle(drain_s)
        self.end_requests()
        await self._wait_idle(ABORT_GRACE_S)
        for connection in list(self.connections):
            connection.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()

    async def _wait_idle(self, timeout_s: float) -> None:
        for _ in range(math.ceil(timeout_s / POLL_S)):
            if not self.num_active:
                return
            await asyncio.sleep(POLL_S)

    def end_requests(self) -> None:
        for connection in list(self.connections):
            self.num_cut += connection.drop(SHUTTING_DOWN)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.now_s = time.monotonic()
            for connection in list(self.connections):
                connection.sweep(self.now_s)
