"""The boundary between a front and an engine loop: an in-process queue, or sockets to other processes (`socket_mailbox.py`).

On a socket, each frame (`child/frames.py`) is one msgpack message (`messages.py`).
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Protocol

from tonle.engine.messages import ToEngine, ToFront


class Mailbox(Protocol):
    """The loop's end."""

    def take(self, wait_s: float | None) -> list[ToEngine]:
        """All mail there is. Sleeps up to `wait_s` (None = until something comes) if there is none."""
        ...

    def publish(self, message: ToFront) -> None:
        """Hand it over. Never waits for a front: that would hold up the others' steps."""
        ...


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
