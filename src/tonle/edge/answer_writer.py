"""The writing half of a caller's connection.

Does: write once per turn of the event loop, tell the sender of an answer when the caller reads too slowly. Does not: read,
close or know requests (`connection.ServerConnection` does).
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, cast

from tonle.edge.exchange import Exchange

if TYPE_CHECKING:
    from tonle.edge.server import HttpServer

WRITE_BUFFER_BYTES = 256 * 1024  # per caller; above it, the sender of the answer is asked to wait


class AnswerWriter(asyncio.Protocol):
    def __init__(self, server: HttpServer) -> None:
        self._flush_soon = server.flush_soon
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._active: Exchange | None = None  # being answered
        self._closing = False
        self._drain_waiters: list[asyncio.Future[None]] = []
        self._unsent: list[bytes] = []
        self._num_unsent = 0  # bytes
        self.full = False
        self.full_since_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

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

    def send(self, data: bytes) -> None:
        """Leaves with everything else of this turn of the event loop, in one write; at once if it is much: in one turn a
        fast backend is read many times, and only a write tells whether the caller keeps up."""
        if not self._closing:
            if not self._unsent:
                self._flush_soon(self)
            self._unsent.append(data)
            self._num_unsent += len(data)
            if self._num_unsent > WRITE_BUFFER_BYTES:
                self.flush()

    def flush(self) -> None:
        unsent, self._unsent, self._num_unsent = self._unsent, [], 0
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
