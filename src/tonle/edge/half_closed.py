"""A caller who sends no more may wait for its answer, or be gone: the two look alike until something is written, which a
socket that was closed answers with a reset.

Does: provoke that reset and look for it. Does not: decide what follows: the transport is aborted, as if it had been seen.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from tonle.edge.exchange import CONTINUE, Exchange

RESET_POLL_S = 0.1  # how often it is looked for
PROBE_S = 10  # between the kernel's probes


def look_for_reset(transport: asyncio.Transport, active: Exchange | None, send: Callable[[bytes], None]) -> None:
    """Until the connection ends. `active` is being answered; `send` writes after what was written before."""
    _provoke(transport, active, send)
    asyncio.get_running_loop().call_later(RESET_POLL_S, _look, transport)


def _provoke(transport: asyncio.Transport, active: Exchange | None, send: Callable[[bytes], None]) -> None:
    """By writing what means nothing: in a stream what `probe` writes, and before a reply 100 Continue (RFC 9110, section 15.2.1).
    Where neither is possible, as in HTTP/1.0, the kernel's probes do it when the caller's kernel has forgotten the
    connection: after a minute."""
    if active is not None and not active.probe() and not active.http_1_0 and not active.head_sent:
        send(CONTINUE)
    if hasattr(socket, "TCP_KEEPIDLE"):
        callers = transport.get_extra_info("socket")
        callers.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        callers.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_S)
        callers.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)


def was_reset(transport: asyncio.Transport) -> bool:
    """The event loop does not tell while nothing is read."""
    return bool(transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))


def _look(transport: asyncio.Transport) -> None:
    if transport.is_closing():
        return
    if was_reset(transport):
        transport.abort()
    else:
        asyncio.get_running_loop().call_later(RESET_POLL_S, _look, transport)
