"""One connection of a caller: its requests one after the other, and what is written to it.

Does: start a task per request, answer in the order asked, cancel when the caller is gone, hold the limits of time, write
once per turn of the event loop. Does not: parse (`reader`), route or answer, listen (`server`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, cast

from tonle.edge.exchange import Exchange
from tonle.edge.reader import DISCARD_BYTES, RequestReader
from tonle.telemetry.logs import one_line

if TYPE_CHECKING:
    from tonle.edge.server import HttpServer

log = logging.getLogger("tonle.edge")

MAX_PIPELINED = 8  # requests of one connection that wait for the one before; more are not read
PARSE_BYTES = 8 * 1024  # at a time: how far past MAX_PIPELINED requests are read
WRITE_BUFFER_BYTES = 256 * 1024  # per caller; above it, the sender of the answer is asked to wait
RESET_POLL_S = 0.1  # how often a caller who sends no more is looked at: it may be gone
PROBE_S = 10  # between the kernel's probes of such a caller
LINGER_S = 5.0  # for a caller who was refused to read why; what it still sends is thrown away

CALLER_HUNG_UP = "the caller hung up"
CALLER_STALLED = "the caller stopped reading"

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class ServerConnection(asyncio.Protocol):
    """A caller's socket."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader = RequestReader(self, max_body_bytes=server.limits.max_body_bytes)
        self._unparsed = b""  # came while too many requests waited
        self._paused = False  # nothing is read from the socket
        self._num_discarded = 0  # bytes that came when nothing more was to be read
        self._fault: tuple[int, str] | None = None  # of what followed the last request; answered in its turn
        self._refused = False
        self._queue: deque[Exchange] = deque()  # read, not begun: an earlier one is being answered
        self._active: Exchange | None = None
        self._task: asyncio.Task[None] | None = None
        self._client = ""  # address of the other end
        self._loopback = False
        self._half_closed = False  # the caller sends no more
        self._closing = False
        self._closing_s = 0.0  # since when
        self._lingering = False
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
        if self._reader.done or self._closing:
            self._discard(len(data))
        elif self._unparsed:
            self._unparsed += data
        else:
            self._parse(data)

    def eof_received(self) -> bool:
        """The caller sends no more. It may wait for its answers all the same, or be gone: the two look alike until
        something is written, which a socket that was closed answers with a reset."""
        self._reader.stop()
        if self._closing:
            return False
        if self.idle or self._is_tls:
            self.close()
            return False
        if not self._half_closed:
            self._half_closed = True
            self._provoke_reset()
            self._loop.call_later(RESET_POLL_S, self._look_for_reset)
        return True

    def _provoke_reset(self) -> None:
        """From a socket that was closed, by writing what means nothing: a comment between events, and before a reply
        100 Continue (RFC 9110, section 15.2.1). Where neither is possible, as in HTTP/1.0, the kernel's probes do it
        when the caller's kernel has forgotten the connection: after a minute."""
        active = self._active
        if active is not None and not active.probe() and not active.http_1_0 and not active.head_sent:
            self.send(CONTINUE)
        if self._transport is not None and hasattr(socket, "TCP_KEEPIDLE"):
            callers = self._transport.get_extra_info("socket")
            callers.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            callers.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_S)
            callers.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)

    def _look_for_reset(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.abort()
        else:
            self._loop.call_later(RESET_POLL_S, self._look_for_reset)

    @property
    def _is_tls(self) -> bool:
        """TLS connections end in both directions at once."""
        return self._transport is not None and self._transport.get_extra_info("sslcontext") is not None

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        self._closing = True
        self._reader.stop()
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

    # -- reading

    def _parse(self, data: bytes) -> None:
        for start in range(0, len(data), PARSE_BYTES):
            if self._reader.done:
                self._discard(len(data) - start)
                return
            if len(self._queue) >= MAX_PIPELINED:
                self._unparsed = data[start:]
                break
            self._reader.feed(data[start : start + PARSE_BYTES])
        if len(self._queue) >= MAX_PIPELINED:
            self._pause_reading()

    def _discard(self, num_bytes: int) -> None:
        self._num_discarded += num_bytes
        if self._num_discarded > DISCARD_BYTES:
            self._pause_reading()

    def _pause_reading(self) -> None:
        if self._transport is not None and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def _read_on(self) -> None:
        """There is room for another request."""
        if self._unparsed:
            data, self._unparsed = self._unparsed, b""
            self._parse(data)
        if len(self._queue) < MAX_PIPELINED:
            self._unpause_reading()

    def _unpause_reading(self) -> None:
        if self._paused and self._transport is not None and self._num_discarded <= DISCARD_BYTES:
            self._paused = False
            self._transport.resume_reading()

    def new_exchange(self) -> Exchange:
        exchange = Exchange(self, client=self._client, loopback=self._loopback)
        exchange.keep_alive = not self._server.draining
        return exchange

    def take(self, exchange: Exchange) -> None:
        if self._active is None:
            self._begin(exchange)
        else:
            self._queue.append(exchange)

    def on_continue_asked(self) -> None:
        if self._active is None:
            self.send(CONTINUE)
            self._reader.continue_asked = False

    def on_fault(self, status: int, why: str) -> None:
        self._fault = (status, why)
        if self._active is None:
            self._refuse()

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
            if not exchange.status:
                exchange.reply(_error_body("the server failed", "server_error"), status=500)
        if not exchange.ended:  # a handler that gave up in the middle: the caller must not take that for the end
            self.close()

    def finish(self, exchange: Exchange) -> None:
        """The reply to `exchange` is complete: the next one may begin."""
        self._active = None
        self._server.num_answered += 1
        self.touched_s = time.monotonic()
        if not exchange.keep_alive or self._server.draining:
            self.close(linger=self._refused or exchange.oversized or self._num_discarded > 0)
        elif self._queue:
            self._begin(self._queue.popleft())
            self._read_on()
        elif self._fault is not None:
            self._refuse()
        elif self._half_closed:
            self.close()
        elif self._reader.continue_asked:
            self.on_continue_asked()

    def _refuse(self) -> None:
        """Not a request at all: answered here, without a handler."""
        assert self._fault is not None
        (status, why), self._fault = self._fault, None
        exchange = self.new_exchange()
        exchange.keep_alive = False
        self._active, self._refused = exchange, True
        exchange.reply(_error_body(why, "invalid_request_error"), status=status)

    def drop(self, why: str) -> bool:
        """End the request under way: its caller is gone. True if there was one, and it had not been ended before."""
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

    def close(self, *, linger: bool = False) -> None:
        """After what was written has left. `linger`: and the caller has read it. Closing a socket on which unread bytes
        lie resets it, and a reset may reach the caller's program before our last words do."""
        if self._closing or self._transport is None:
            return
        self.flush()
        self._closing, self._closing_s = True, time.monotonic()
        self._reader.stop()
        self._release_waiters()
        if linger and not self._half_closed and self._transport.can_write_eof():
            self._lingering = True
            self._transport.write_eof()
            self._unpause_reading()
        else:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def retire(self) -> None:
        """Take no more requests: close if idle, else after the answer, which says so if it has not begun."""
        if self._active is None:
            self.close()
        else:
            self._active.keep_alive = False

    # -- limits

    @property
    def idle(self) -> bool:
        return self._active is None and not self._queue

    def sweep(self, now_s: float) -> None:
        """Close what has been idle, has not finished its request, or has not read, for too long."""
        limits, incoming = self._server.limits, self._reader.incoming
        if self._closing:  # and what was written does not leave, or the caller does not
            if now_s - self._closing_s > (LINGER_S if self._lingering else limits.write_timeout_s):
                self.abort()
        elif self.full and now_s - self.full_since_s > limits.write_timeout_s:
            self.drop(CALLER_STALLED)
            self.abort()
        elif incoming is not None and now_s - incoming.arrived_s > limits.read_timeout_s:
            self._reader.stop()
            self.on_fault(408, "the request did not arrive in time")
        elif self.idle and incoming is None and now_s - self.touched_s > limits.idle_timeout_s:
            self.close()


def _error_body(why: str, kind: str) -> bytes:
    body = '{"error":{"message":"%s","type":"%s","param":null,"code":null}}'
    return (body % (why.replace('"', "'").replace("\\", "/"), kind)).encode()
