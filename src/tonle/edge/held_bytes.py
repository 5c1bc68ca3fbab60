"""`HeldBytes`: how much of callers' requests a server holds in memory, and the most it may.

Does: count the bytes of every request from its first byte to the end of its answer. Does not: choose which one is refused
when there are too many (`server.HttpServer` does).
"""

from __future__ import annotations

from collections.abc import Callable

from tonle.edge.exchange import Exchange


class HeldBytes:
    def __init__(self, max_bytes: int, make_room: Callable[[], None]) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._make_room = make_room  # called when there are more than `max_bytes`

    def hold(self, exchange: Exchange, num_bytes: int) -> None:
        """`exchange` now has this many in all. It may have been refused when this returns."""
        self.num_bytes += num_bytes - exchange.num_held
        exchange.num_held = num_bytes
        if self.num_bytes > self.max_bytes:
            self._make_room()

    def release(self, exchange: Exchange) -> None:
        """Harmless if repeated."""
        self.num_bytes -= exchange.num_held
        exchange.num_held = 0
