"""One child process: start it, hand it its settings, wait for its end.

In the parent: `spawn`, `exit_reason`. In the child: `inherited_sockets`, `read_settings`, `ignore_signals`.
Does not: decide when to start one again (`supervisor.py`, and the audit's `WriterClient`).
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import subprocess
import sys
from typing import Any, TypeVar

import msgspec

from tonle.child.frames import read_frame, write_frame

log = logging.getLogger("tonle.child")

EXIT_S = 5.0  # for a child that has closed its socket; unloading torch takes a moment

SettingsT = TypeVar("SettingsT", bound=msgspec.Struct)


# -- in the parent


def spawn(
    module: str, settings: msgspec.Struct, *sockets: socket.socket, **popen: Any
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run a module of ours. Returns its process and our end of its control socket. Raises `OSError`.

    The child inherits its control socket and `sockets`; their numbers are its arguments, in this order.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        numbers = [sock.fileno() for sock in (theirs, *sockets)]
        command = [sys.executable, "-m", module, *map(str, numbers)]
        try:
            process = subprocess.Popen(command, pass_fds=numbers, stdin=subprocess.DEVNULL, **popen)
        except BaseException:
            ours.close()
            raise
    try:
        with contextlib.suppress(ConnectionError):  # it died already; the next read from its control socket tells
            write_frame(ours, msgspec.msgpack.encode(settings, enc_hook=str))  # paths travel as text
    except BaseException:
        abandon(process, ours)
        raise
    return process, ours


def abandon(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    """End a child that has just been started and is of no use."""
    control.close()
    process.kill()
    process.wait()


def exit_reason(process: subprocess.Popen[bytes], wait_s: float = EXIT_S) -> str:
    """How a child ended whose control socket is closed. Blocks; one that does not end within `wait_s` is killed."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(wait_s)
    if process.returncode is None:
        kill_late(process, wait_s)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel, for example on a bad disk
            process.wait(wait_s)
        return killed_reason(wait_s)
    return code_reason(process.returncode)


def kill_late(process: subprocess.Popen[bytes], wait_s: float) -> None:
    log.warning("%s (process %d) did not end within %g s and is killed", _module(process), process.pid, wait_s)
    process.kill()


def killed_reason(wait_s: float) -> str:
    return f"killed because it did not end within {wait_s:g} s"


def code_reason(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"signal {-code}"


def _module(process: subprocess.Popen[bytes]) -> str:
    """Of a process that `spawn` started."""
    args = process.args
    return str(args[2]) if isinstance(args, list) else str(args)


# -- in the child


def inherited_sockets() -> list[socket.socket]:
    """The control socket, then the others that the parent passed on. Children of this process do not get them."""
    sockets = [socket.socket(fileno=int(number)) for number in sys.argv[1:]]
    for sock in sockets:
        sock.set_inheritable(False)
    return sockets


def read_settings(control: socket.socket, kind: type[SettingsT]) -> SettingsT:
    """The first message. Ends this process if the parent is gone already."""
    try:
        body = read_frame(control)
    except ConnectionError:
        body = None
    if body is None:
        raise SystemExit(0)
    return msgspec.msgpack.decode(body, type=kind, dec_hook=lambda custom, text: custom(text))


def ignore_signals() -> None:
    """A terminal or a service manager sends them to every process of a group; the parent decides when to stop."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
