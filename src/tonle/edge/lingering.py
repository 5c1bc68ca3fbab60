"""`Lingering`: callers who were refused while they were still sending.

Our side of their connection has ended. Closing it while bytes lie unread would reset it, and a reset may reach the caller's
program before our last words do; so what they send is read and thrown away, until they have ended, too.

Does: read from one of them at a time, now and then, however many they are: callers who are not wanted must not keep the event
loop busy, nor the kernel's memory. Does not: end those who are silent for too long (`connection.ServerConnection.sweep`).
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable

READ_EVERY_S = 0.01  # one read, of at most 256 KiB: some 25 MB per second for all of them
MAX_CALLERS = 64  # for one more, the first is closed
_TCP_CLOSE = 7  # tcpi_state, the first byte of Linux's TCP_INFO


class Lingering:
    def __init__(self) -> None:
        self._callers: deque[tuple[asyncio.Transport, Callable[[], None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, transport: asyncio.Transport, read_on: Callable[[], None]) -> None:
        """`read_on` lets one read happen; after it, nothing is read until it is called again."""
        self._callers.append((transport, read_on))
        if len(self._callers) > MAX_CALLERS:
            self._callers.popleft()[0].abort()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(READ_EVERY_S, self._turn)

    def _turn(self) -> None:
        self._timer = None
        while self._callers:
            transport, read_on = self._callers.popleft()
            if transport.is_closing():
                continue
            if _both_ended(transport):
                transport.abort()
                continue
            read_on()
            self.add(transport, read_on)
            return


def _both_ended(transport: asyncio.Transport) -> bool:
    """The caller's kernel has all of our answer, and the caller sends no more: nothing is lost by closing, though bytes lie
    unread. Where the kernel does not tell: False."""
    try:
        info = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    except (AttributeError, OSError):
        return False
    return bool(info) and info[0] == _TCP_CLOSE
