"""A connection of the server without a socket: what it is fed, and each write it makes."""

from __future__ import annotations

import asyncio
from typing import Any

from tonle.edge.connection import ServerConnection
from tonle.edge.exchange import Exchange
from tonle.edge.server import Handle, HttpServer, ServerLimits


class Wire(asyncio.Transport):
    """Keeps what is written, write by write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False
        self.reading = True

    def write(self, data: Any) -> None:
        assert not self.closed
        self.writes.append(bytes(data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


def connect(handle: Handle) -> tuple[ServerConnection, Wire]:
    """In a running event loop."""
    connection, wire = ServerConnection(HttpServer(handle, ServerLimits())), Wire()
    connection.connection_made(wire)
    return connection, wire


def feed(*pieces: bytes) -> tuple[list[Exchange], Wire]:
    """The requests in `pieces`, each of which comes in a turn of its own, and what was answered."""
    begun: list[Exchange] = []

    async def handle(exchange: Exchange) -> None:
        begun.append(exchange)
        exchange.reply(b"{}")

    async def main() -> Wire:
        connection, wire = connect(handle)
        for piece in pieces:
            connection.data_received(piece)
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        return wire

    loop = asyncio.new_event_loop()
    try:
        return begun, loop.run_until_complete(main())
    finally:
        loop.close()
