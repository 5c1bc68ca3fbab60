"""The server: a listening socket, every connection made to it, and an orderly end.

Does: accept, sweep for timeouts, bound connections and the memory of requests, drain. Does not: read or write
(`connection`), route or answer.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import select
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tonle.child.heap import HeapTrimmer
from tonle.edge.answer_writer import AnswerWriter
from tonle.edge.connection import ServerConnection
from tonle.edge.exchange import Exchange
from tonle.edge.held_bytes import HeldBytes
from tonle.edge.lingering import Lingering
from tonle.edge.listening import BACKLOG
from tonle.edge.refusal_turns import RefusalTurns
from tonle.errors import CapacityError

POLL_S = 0.02  # while draining
QUIET_TURNS = 3  # of the event loop: on asyncio's own, a connection that was accepted in one turn is ours in the next
ABORT_GRACE_S = 1.0  # for requests that were ended to close their records and say so
SWEEP_S = 2.0  # how often connections are looked over for timeouts
TRIM_EVERY = 5  # sweeps
HANDSHAKE_S = 15.0  # for TLS
MIN_CLOSED = 16  # connections closed at a time to make room for new ones: finding them means looking at all

SHUTTING_DOWN = "the server is shutting down"
NO_ROOM = "requests on this server take all the memory they may take together; try again later"

Handle = Callable[[Exchange], Awaitable[None]]
CheckHead = Callable[[Exchange], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    max_body_bytes: int = 8 * 1024**2
    request_memory_bytes: int = 256 * 1024**2  # of all requests together
    max_connections: int = 4096
    read_timeout_s: float = 60.0  # from the first byte of a request to its last
    idle_timeout_s: float = 75.0  # longer than load balancers keep idle connections, so that they close them
    write_timeout_s: float = 60.0  # a caller who reads nothing for this long is given up


class HttpServer:
    """Owns the listening socket and every connection made to it.

    `check_head` is called with the head of each request before any of its body is kept. What it raises becomes the
    exchange's `refusal`, which `handle` answers with.
    """

    def __init__(self, handle: Handle, limits: ServerLimits, *, check_head: CheckHead | None = None) -> None:
        self.handle = handle
        self.check_head = check_head
        self.limits = limits
        self.held = HeldBytes(limits.request_memory_bytes, self._refuse_largest)
        self.connections: set[ServerConnection] = set()
        self.draining = False
        self.refusals = RefusalTurns()
        self.lingering = Lingering()
        self.num_answered = 0
        self._server: asyncio.Server | None = None
        self._listener: socket.socket | None = None
        self.num_handled = 0  # requests whose handler has not returned; their caller may be gone
        self.num_cut = 0  # requests that a shutdown has ended
        self._sweeper: asyncio.Task[None] | None = None
        self._unflushed: list[AnswerWriter] = []

    async def start(self, listener: socket.socket, *, tls: ssl.SSLContext | None = None) -> None:
        loop, self._listener = asyncio.get_running_loop(), listener
        handshake_s = None if tls is None else HANDSHAKE_S
        self._server = await loop.create_server(
            lambda: ServerConnection(self), sock=listener, ssl=tls, backlog=BACKLOG, ssl_handshake_timeout=handshake_s
        )
        self._sweeper = asyncio.create_task(self._sweep())

    def flush_soon(self, connection: AnswerWriter) -> None:
        if not self._unflushed:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unflushed.append(connection)

    def _flush(self) -> None:
        connections, self._unflushed = self._unflushed, []
        for connection in connections:
            connection.flush()

    # -- limits

    def has_room(self) -> bool:
        """For one more connection, if need be in place of some that are not needed."""
        if len(self.connections) < self.limits.max_connections:
            return True
        ranked = [(rank, id(each), each) for each in self.connections if (rank := each.spare_since()) is not None]
        closed = heapq.nsmallest(MIN_CLOSED, ranked)
        for _, _, connection in closed:
            self.connections.discard(connection)
            connection.abort()
        return bool(closed)

    def _refuse_largest(self) -> None:
        """Of the requests that are being read, until the rest fits: small ones still get through. One that has been read
        is answered."""
        while self.held.num_bytes > self.held.max_bytes:
            largest = max(self.connections, key=lambda each: each.num_unfinished_bytes, default=None)
            if largest is None or not largest.num_unfinished_bytes:
                return
            largest.give_up_unfinished(CapacityError(NO_ROOM))

    async def _sweep(self) -> None:
        heap = HeapTrimmer()
        for number in itertools.count(1):
            await asyncio.sleep(SWEEP_S)
            now_s = time.monotonic()
            for connection in list(self.connections):
                connection.sweep(now_s)
            if number % TRIM_EVERY == 0:
                await asyncio.to_thread(heap.look)

    # -- the end

    @property
    def num_active(self) -> int:
        return sum(not connection.idle for connection in self.connections)

    async def stop(self, *, drain_s: float) -> None:
        """Accept nothing new, answer for `drain_s` what has come, then end it."""
        self.draining = True
        server, self._server = self._server, None
        if server is not None:
            await self._accept_last()
            server.close()
        for connection in list(self.connections):
            connection.retire()
        await self._wait(drain_s, lambda: all(each.lingering for each in self.connections))
        self.end_requests()
        await self._wait(ABORT_GRACE_S, lambda: not self.connections and not self.num_handled)
        for connection in list(self.connections):
            connection.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()

    async def _accept_last(self) -> None:
        """Connections that the kernel has accepted: closing the listener would reset them."""
        assert self._listener is not None
        poll, num_quiet = select.poll(), 0
        poll.register(self._listener, select.POLLIN)
        for _ in range(BACKLOG):
            await asyncio.sleep(0)
            num_quiet = 0 if poll.poll(0) else num_quiet + 1
            if num_quiet == QUIET_TURNS:
                return

    async def _wait(self, timeout_s: float, is_over: Callable[[], bool]) -> None:
        for _ in range(math.ceil(timeout_s / POLL_S)):
            if is_over():
                return
            await asyncio.sleep(POLL_S)

    def end_requests(self) -> None:
        for connection in list(self.connections):
            self.num_cut += connection.end(SHUTTING_DOWN)
