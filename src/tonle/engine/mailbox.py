"""The boundary between a front and an engine loop: an in-process queue, or a socket to another process.

On the socket, each frame (`child/frames.py`) is one msgpack message (`messages.py`).
"""

from __future__ import annotations

import queue
import select
import socket
from collections.abc import Callable
from typing import Protocol

import msgspec

from tonle.child.frames import Frames, write_frame
from tonle.engine.messages import Stop, ToEngine, ToFront


class Mailbox(Protocol):
    """The loop's end."""

    def take(self, wait_s: float | None) -> list[ToEngine]:
        """All mail there is. Sleeps up to `wait_s` (None = until something comes) if there is none."""
        ...

    def publish(self, message: ToFront) -> None: ...


class ThreadMailbox:
    """Loop and front share a process. `publish` calls `deliver` on the loop's thread: it must only hand over."""

    def __init__(self, deliver: Callable[[ToFront], None]) -> None:
        self._deliver = deliver
        self._queue: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()

    def put(self, message: ToEngine) -> None:
        self._queue.put(message)

    def take(self, wait_s: float | None) -> list[ToEngine]:
        mail: list[ToEngine] = []
        try:
            if wait_s == 0.0:
                mail.append(self._queue.get_nowait())
            else:
                mail.append(self._queue.get(timeout=wait_s))
            while True:
                mail.append(self._queue.get_nowait())
        except queue.Empty:
            return mail

    def publish(self, message: ToFront) -> None:
        self._deliver(message)


class SocketMailbox:
    """The loop's end of a socket. A closed socket reads as `Stop`: an engine never outlives its front."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._frames = Frames()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def take(self, wait_s: float | None) -> list[ToEngine]:
        mail: list[ToEngine] = []
        while select.select([self._sock], [], [], 0.0 if mail else wait_s)[0]:
            data = self._sock.recv(1 << 20)
            if not data:
                return [*mail, Stop()]
            mail += [self._decoder.decode(body) for body in self._frames.feed(data)]
        return mail

    def publish(self, message: ToFront) -> None:
        write_frame(self._sock, self._encoder.encode(message))
