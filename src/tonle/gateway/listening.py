"""An address to listen on, and the event loop to run on.

Does: bind with errors that say what to do, run on uvloop where there is one, keep Python's collector out of the way.
Does not: serve.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import socket
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from tonle.errors import ConfigError

# Records and keys are written on threads. At Python's own 5 ms, a caller's first byte would wait for them that long.
SWITCH_S = 0.0005
# A request makes no cycles, so there is little to find: look after as many new objects as a few hundred requests hold.
# At Python's own 700, the collector walks over every request under way several times before it ends.
COLLECT_AFTER = (50_000, 20, 20)
BACKLOG = 2048  # connections the kernel holds before we accept them

ResultT = TypeVar("ResultT")


def run(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """`asyncio.run`, on uvloop where there is one, with threads that let the loop go first."""
    sys.setswitchinterval(SWITCH_S)
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


def rest_collector() -> None:
    """What is here now stays: the collector need not look at it again, nor look as often. Once, when all is built."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


def bind(host: str, port: int) -> socket.socket:
    """Claim the address. Port 0 takes a free one. Raises `ConfigError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        raise ConfigError(f"cannot listen on {host}: there is no such address. Check --host.", param="host") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        in_use = error.errno == errno.EADDRINUSE
        why = "another program is using it. Choose another with --port" if in_use else f"{error.strerror}"
        raise ConfigError(f"cannot listen on {host}, port {port}: {why}.", param="port") from None
    listener.setblocking(False)
    return listener
