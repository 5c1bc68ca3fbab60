"""The server: a listening socket, every connection made to it, and an orderly end.

Does: accept, sweep for timeouts, drain. Does not: read or write (`connection`), route or answer.
"""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tonle.edge.connection import ServerConnection
from tonle.edge.exchange import Exchange

POLL_S = 0.02  # while draining
ABORT_GRACE_S = 1.0  # for requests that were ended to close their records and say so
SWEEP_S = 2.0  # how often connections are looked over for timeouts

SHUTTING_DOWN = "the server is shutting down"

Handle = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    max_body_bytes: int = 8 * 1024**2
    read_timeout_s: float = 60.0  # from the first byte of a request to its last
    idle_timeout_s: float = 75.0  # longer than load balancers keep idle connections, so that they close them
    write_timeout_s: float = 60.0  # a caller who reads nothing for this long is given up


class HttpServer:
    """Owns the listening socket and every connection made to it."""

    def __init__(self, handle: Handle, limits: ServerLimits) -> None:
        self.handle = handle
        self.limits = limits
        self.connections: set[ServerConnection] = set()
        self.draining = False
        self.num_answered = 0
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
            connection.retire()
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
            now_s = time.monotonic()
            for connection in list(self.connections):
                connection.sweep(now_s)
