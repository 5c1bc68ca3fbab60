"""One connection of a caller: its requests one after the other, and what is written to it.

Does: start a task per request, answer in the order asked, cancel when the caller is gone, hold the limits of time,
end in good order when the server stops. Does not: parse (`reader`), write (`answer_writer`), route or answer, listen
(`server`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from tonle.edge.answer_writer import AnswerWriter
from tonle.edge.exchange import CONTINUE, Exchange
from tonle.edge.half_closed import look_for_reset, was_reset
from tonle.edge.reader import RequestReader
from tonle.errors import ShuttingDown, TonleError
from tonle.telemetry.logs import one_line

if TYPE_CHECKING:
    from tonle.edge.server import HttpServer

log = logging.getLogger("tonle.edge")

MAX_PIPELINED = 8  # requests of one connection that wait for the one before; more are not read
PARSE_BYTES = 8 * 1024  # at a time: how far past MAX_PIPELINED requests are read
DISCARD_BYTES = 64 * 1024**2  # that a caller may still send when nothing more is read; then it is no longer listened to
LINGER_S = 5.0  # without a byte, for a caller who was refused to read why; what it still sends is thrown away
LAST_CALL_S = 0.5  # when the server stops: for a request that a caller sent before it could know

CALLER_HUNG_UP = "the caller hung up"
CALLER_STALLED = "the caller stopped reading"

NO_CONNECTION = "this server has as many connections as it may have; try again later"

RETRY_SOON = ("retry-after", "1")


class ServerConnection(AnswerWriter):
    """A caller's socket."""

    def __init__(self, server: HttpServer) -> None:
        super().__init__(server)
        self._server = server
        self._reader = RequestReader(self, server.held, max_body_bytes=server.limits.max_body_bytes)
        self._unparsed = b""  # came while too many requests waited
        self._paused = False  # nothing is read from the socket
        self._num_discarded = 0  # bytes that came when nothing more was to be read
        self._fault: tuple[int, str] | None = None  # of what followed the last request; answered in its turn
        self._refused = False
        self._queue: deque[Exchange] = deque()  # read, not begun: an earlier one is being answered
        self._task: asyncio.Task[None] | None = None
        self._client = ""  # address of the other end
        self._loopback = False
        self._half_closed = False  # the caller sends no more
        self._closing_s = self._heard_s = 0.0  # since when; and when lingering: the last moment something came
        self.lingering = False  # everything was written; the caller has yet to read it
        self.retiring = False  # the server is being stopped
        self.touched_s = time.monotonic()  # last moment it was not idle

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self._client = str(peer[0]) if peer else ""
        self._loopback = not peer or self._client.startswith(("127.", "::1"))
        has_room = self._server.has_room()
        self._server.connections.add(self)
        if not has_room:
            self._reader.stop()
            self.on_fault(503, NO_CONNECTION)
        elif self._server.draining:
            self.retire()

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
        if self.idle or _is_tls(self._transport):
            self.close()
            return False
        if not self._half_closed:
            assert self._transport is not None
            self._half_closed = True
            look_for_reset(self._transport, self._active, self.send)
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        self._closing = True
        self._reader.stop()
        self._release_waiters()
        self._clear_queue()
        if self._active is not None:
            self._server.held.release(self._active)
            self.drop(CALLER_HUNG_UP)

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
        if self.lingering:  # one read: `Lingering` calls for the next
            self._heard_s = time.monotonic()
            self._pause_reading()
        elif self._num_discarded > DISCARD_BYTES or (self._active is not None and self._active.unread is not None):
            self._pause_reading()  # of a refused body, the rest is read when the answer has been written

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
        transport = self._transport
        if self._paused and transport and not transport.is_closing() and self._num_discarded <= DISCARD_BYTES:
            self._paused = False
            transport.resume_reading()

    def new_exchange(self) -> Exchange:
        return Exchange(self, client=self._client, loopback=self._loopback)

    def check_head(self, exchange: Exchange) -> None:
        check = self._server.check_head
        if check is not None:
            try:
                check(exchange)
            except Exception as error:
                exchange.refusal = error

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
        if exchange.refusal is None:
            self._start(exchange)
        else:
            self._server.refusals.take(lambda: self._start(exchange))

    def _start(self, exchange: Exchange) -> None:
        self._task = self._loop.create_task(self._run(exchange))

    async def _run(self, exchange: Exchange) -> None:
        self._server.num_handled += 1
        try:
            await self._server.handle(exchange)
        except asyncio.CancelledError:
            if not exchange.gone:
                raise
        except Exception:
            _fail(exchange)
        finally:
            self._server.num_handled -= 1
        if not exchange.ended:  # a handler that gave up in the middle: the caller must not take that for the end
            self.close()
            self._server.held.release(exchange)
            self._active = None  # else a cycle, with the body in it

    def finish(self, exchange: Exchange) -> None:
        """The reply to `exchange` is complete: the next one may begin."""
        self._active = None
        server = self._server
        server.held.release(exchange)
        server.num_answered += 1
        self.touched_s = time.monotonic()
        if not exchange.keep_alive or exchange.gone is not None:
            self.close(linger=self._refused or exchange.unread is not None or self._num_discarded > 0)
        elif self._queue:
            self._begin(self._queue.popleft())
            self._read_on()
        elif self._fault is not None:
            self._refuse()
        elif self._half_closed:
            self.close()
        elif self._reader.continue_asked:
            self.on_continue_asked()
        elif self.retiring:
            self._close_after_last_call()

    def _refuse(self) -> None:
        """Not a request at all: answered here, without a handler."""
        assert self._fault is not None
        (status, why), self._fault = self._fault, None
        exchange = self.new_exchange()
        exchange.keep_alive = False
        self._active, self._refused = exchange, True
        kind, headers = ("invalid_request_error", []) if status < 500 else ("service_unavailable_error", [RETRY_SOON])
        exchange.reply(_error_body(why, kind), status=status, headers=headers)

    def drop(self, why: str) -> bool:
        """End the request under way: its caller is gone. True if there was one, and it had not been ended before."""
        if self._active is None:
            return False
        is_first = not self._active.gone
        self._active.gone = self._active.gone or why
        if self._task is not None:
            self._task.cancel()
        return is_first

    def close(self, *, linger: bool = False) -> None:
        """After what was written has left. `linger`: and the caller has read it. Closing a socket on which unread bytes
        lie resets it, and a reset may reach the caller's program before our last words do."""
        if self._closing or self._transport is None:
            return
        self.flush()
        self._closing, self._closing_s = True, time.monotonic()
        self._heard_s = self._closing_s
        self._reader.stop()
        self._release_waiters()
        if linger and not self._half_closed:
            self.lingering = True
            if self._transport.can_write_eof():  # TLS cannot: there the caller sees the end of the answer only
                self._transport.write_eof()
            self._pause_reading()
            self._server.lingering.add(self._transport, self._unpause_reading)
        else:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- the end of the server

    def retire(self) -> None:
        """Answer what has come, in full or in part, and what is on its way; then close. An answer whose head has not left
        says that it is the last, so that the caller sends no more: `ends_with`."""
        self.retiring = True
        self._close_after_last_call()

    def ends_with(self, exchange: Exchange) -> bool:
        """Nothing else was asked, so `exchange` says that it is the last."""
        if self._queue or self._unparsed or self._reader.incoming is not None or self._fault is not None:
            return False
        self._reader.stop()
        return True

    def _close_after_last_call(self) -> None:
        """A caller may have sent a request before it could know that this server stops: closing at once would lose it."""
        self._loop.call_later(LAST_CALL_S, self._close_if_quiet)

    def _close_if_quiet(self) -> None:
        if self.idle and self._reader.incoming is None and not self._unparsed:
            self.close()

    def end(self, why: str) -> int:
        """Now, whatever is under way or being read. How many requests that has cut off."""
        num_cut = int(self.drop(why)) + len(self._queue)
        self._clear_queue()
        self._unparsed = b""
        if self._reader.incoming is not None:
            num_cut += 1
            self._reader.stop()
            self.on_fault(ShuttingDown.status, why)
        elif self.idle:
            self.close()
        return num_cut

    def _clear_queue(self) -> None:
        for exchange in self._queue:
            self._server.held.release(exchange)
        self._queue.clear()

    # -- limits

    @property
    def idle(self) -> bool:
        return self._active is None and not self._queue

    @property
    def num_unfinished_bytes(self) -> int:
        """Held of a request that is being read."""
        incoming = self._reader.incoming
        return 0 if incoming is None else incoming.num_held

    def give_up_unfinished(self, error: TonleError) -> None:
        """Refuse the request that is being read."""
        self._reader.give_up(error)

    def spare_since(self) -> tuple[int, float] | None:
        """None: it is needed. Else how it ranks among those to be closed for a new one, lowest first: callers who were
        refused, then idle ones, then those who have not even sent a head, of each the one of longest standing."""
        incoming = self._reader.incoming
        if self._closing:
            return (0, self._closing_s) if self.lingering else None
        if not self.idle:
            return None
        if incoming is None:
            return 1, self.touched_s
        return None if incoming.method else (2, incoming.arrived_s)

    def sweep(self, now_s: float) -> None:
        """Close what has been idle, has not finished its request, or has not read, for too long."""
        limits, incoming = self._server.limits, self._reader.incoming
        if self._closing:  # and what was written does not leave, or the caller does not
            is_silent = self.lingering and now_s - self._heard_s > LINGER_S
            longest_s = limits.read_timeout_s if self.lingering else limits.write_timeout_s
            if is_silent or now_s - self._closing_s > longest_s:
                self.abort()
        elif self.full and now_s - self.full_since_s > limits.write_timeout_s:
            self.drop(CALLER_STALLED)
            self.abort()
        elif incoming is not None and now_s - incoming.arrived_s > limits.read_timeout_s:
            if not self._reader.hand_over_refused():
                self._reader.stop()
                self.on_fault(408, "the request did not arrive in time")
        elif self.idle and incoming is None and now_s - self.touched_s > limits.idle_timeout_s:
            self.close()
        elif self._paused and self._transport is not None and was_reset(self._transport):
            self.abort()


def _is_tls(transport: asyncio.Transport | None) -> bool:
    """TLS connections end in both directions at once."""
    return transport is not None and transport.get_extra_info("sslcontext") is not None


def _fail(exchange: Exchange) -> None:
    """Its handler raised what it should not."""
    fields = {"request_id": exchange.request_id, "trace_id": "" if exchange.trace is None else exchange.trace.trace_id}
    log.exception("%s %s failed, id %s", exchange.method, one_line(exchange.path), exchange.request_id,
                  extra={"fields": fields})  # fmt: skip
    if not exchange.status:
        exchange.reply(_error_body("the server failed", "server_error"), status=500)


def _error_body(why: str, kind: str) -> bytes:
    body = '{"error":{"message":"%s","type":"%s","param":null,"code":null}}'
    return (body % (why.replace('"', "'").replace("\\", "/"), kind)).encode()
