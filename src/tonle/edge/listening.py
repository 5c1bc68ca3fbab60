"""An address to listen on, its URL, and the event loop to run on: what server and gateway share.

Does: bind with errors that say what to do, name the address, run on uvloop where there is one. Does not: serve.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Coroutine
from typing import Any, TypeVar

from tonle.errors import ConfigError

BACKLOG = 2048  # connections the kernel holds before we accept them
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # every interface, and what this machine's own programs call it

ResultT = TypeVar("ResultT")


def run(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """`asyncio.run`, on uvloop where there is one."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


def bind(host: str, port: int, *, share: bool = False) -> socket.socket:
    """Claim the address, before anything slow is begun. Port 0 takes a free one. Raises `ConfigError`.

    With `share`, more sockets of this user may be bound to it with `share`: the kernel deals out connections.
    """
    if not 0 <= port < 2**16:
        raise ConfigError(
            f"cannot listen on {host}, port {port}: ports go from 0 to 65535. Check --port.", param="port"
        )
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        raise ConfigError(f"cannot listen on {host}: there is no such address. Check --host.", param="host") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _bind_error(host, port, error) from None
    listener.setblocking(False)
    return listener


def _bind_error(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        why = "another program is using it. Stop that, or choose another port with --port"
    elif error.errno == errno.EACCES:
        why = "ports below 1024 need more rights. Choose another port with --port"
    elif error.errno == errno.EADDRNOTAVAIL:
        why = "this machine has no such address. Choose another with --host"
    else:
        why = f"{error.strerror}. Check --host and --port"
    return ConfigError(f"cannot listen on {host}, port {port}: {why}.", param="port")


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def local_url(host: str, port: int) -> str:
    """Where a program on this machine reaches it."""
    return url_of(EVERYWHERE.get(host, host), port)
