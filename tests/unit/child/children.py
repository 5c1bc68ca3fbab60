"""A child process for tests: does what its settings say. Run by `spawn` as a module of ours is."""

from __future__ import annotations

import os
import select
import signal
import socket
import time

import msgspec

from tonle.child.frames import read_frame, write_frame
from tonle.child.spawn import ignore_signals, inherited_sockets, read_settings

MODULE = "tests.unit.child.children"


class ChildSettings(msgspec.Struct):
    """`starts` counts starts, one byte each: what a child does may depend on how many there were before it."""

    starts: str
    plan: list[str]  # what the first, second, … child does; the last entry holds for all later ones
    ignores_signals: bool = True


def main(control: socket.socket, *others: socket.socket) -> None:
    signal.alarm(120)  # a test that fails leaves no process behind
    settings = read_settings(control, ChildSettings)
    if settings.ignores_signals:
        ignore_signals()
    with open(settings.starts, "ab") as file:  # noqa: PTH123
        file.write(b".")
        number = file.tell()
    match settings.plan[min(number, len(settings.plan)) - 1]:
        case "die":
            os._exit(3)
        case "die by a signal":
            os.kill(os.getpid(), signal.SIGKILL)
        case "be ready, then die":
            write_frame(control, b"ready")
            os._exit(4)
        case "be ready, die when told":
            write_frame(control, b"ready")
            read_frame(control)
            os._exit(5)
        case "never be ready":
            signal.pause()
        case "ignore the request":
            write_frame(control, b"ready")
            while True:
                signal.pause()
        case "close the socket and hang":
            write_frame(control, b"ready")
            control.close()
            time.sleep(3600)
        case "send garbage when told":
            write_frame(control, b"ready")
            read_frame(control)
            control.sendall(b"\xff" * 100)
            while read_frame(control) is not None:
                pass
        case "leave the socket with a grandchild":
            if os.fork() == 0:
                poll = select.poll()
                poll.register(control, 0)  # reports only that the other side is closed in both directions
                poll.poll()
                os._exit(0)
            write_frame(control, b"ready")
            signal.pause()
        case "echo":
            write_frame(control, b"ready")
            while (body := read_frame(control)) is not None:
                write_frame(control, body)
            for other in others:
                other.sendall(b"bye")


if __name__ == "__main__":
    main(*inherited_sockets())
