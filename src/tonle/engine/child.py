"""Child processes of ours: the order each reads as the first frame on its socket, and how it ended.

Does: what the engine's process and front ends have in common. Does not: decide whom to start, or when again.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import struct
import subprocess
import sys
from typing import Any, TypeVar

import msgspec

_HEADER = struct.Struct("<I")
_REAP_TRIES, _REAP_S = 200, 0.01

OrderT = TypeVar("OrderT", bound=msgspec.Struct)


def spawn(module: str, *sockets: socket.socket, **popen: Any) -> subprocess.Popen[bytes]:
    """Run a module of ours. It finds the numbers of these sockets, which it inherits, in its arguments."""
    numbers = [sock.fileno() for sock in sockets]
    command = [sys.executable, "-m", module, *map(str, numbers)]
    return subprocess.Popen(command, pass_fds=numbers, stdin=subprocess.DEVNULL, **popen)


def order_frame(order: msgspec.Struct) -> bytes:
    """Send this first. Paths travel as text."""
    body = msgspec.msgpack.encode(order, enc_hook=str)
    return _HEADER.pack(len(body)) + body


def read_order(sock: socket.socket, kind: type[OrderT]) -> OrderT:
    """In the child. Ends the process if whoever started it is gone already."""
    (size,) = _HEADER.unpack(_read_exactly(sock, _HEADER.size))
    return msgspec.msgpack.decode(_read_exactly(sock, size), type=kind, dec_hook=lambda custom, text: custom(text))


def _read_exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise SystemExit(0)
        data += part
    return data


async def epitaph(process: subprocess.Popen[bytes]) -> str:
    """How a child ended whose socket closed."""
    for _ in range(_REAP_TRIES):  # the socket closes a moment before the process can be reaped
        if (code := process.poll()) is not None:
            return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        await asyncio.sleep(_REAP_S)
    process.kill()
    await asyncio.to_thread(process.wait)
    return "it closed its socket and hung"
