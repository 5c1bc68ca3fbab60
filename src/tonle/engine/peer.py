"""`Peer`: the engine's end of one front's socket. Nothing here ever waits for the front.

Does: read what came, send what can be sent and hold the rest, notice that the front does not read. Does not: interpret
messages.
"""

from __future__ import annotations

import selectors
import socket
import time

from tonle.child.frames import Frames, frame

MAX_UNREAD_BYTES = 64 * 2**20  # held for a front; one that is further behind hangs, and loses its requests
MAX_SILENT_S = 60.0  # the same for one that has read nothing for that long
_READ_BYTES = 1 << 20


class Peer:
    """One front's socket, and what it has under way."""

    def __init__(self, number: int, sock: socket.socket, selector: selectors.BaseSelector) -> None:
        sock.setblocking(False)
        self.number = number  # of its connection; 0 for the parent of this process
        self.handles: set[int] = set()  # under way, as the loop knows them
        self.told_s = 0.0  # when it last got the statistics
        self.is_hung = False  # it does not read: it gets nothing more until it has read what is held for it
        self.owed: set[int] = set()  # handles that were cancelled because it hung, which it does not know yet
        self._sock = sock
        self._selector = selector
        self._frames = Frames()
        self._unsent = bytearray()
        self._read_s = 0.0  # when the front last made room for more, if something is held for it
        selector.register(sock, selectors.EVENT_READ, self)

    @property
    def is_open(self) -> bool:
        return self._sock.fileno() >= 0

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def is_too_far_behind(self, now: float) -> bool:
        return bool(self._unsent) and (len(self._unsent) > MAX_UNREAD_BYTES or now - self._read_s > MAX_SILENT_S)

    def read(self) -> list[bytes]:
        """The messages that came. Closes the connection if the front did. Raises `FrameError`."""
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.close()
            return []
        return self._frames.feed(data)

    def send(self, body: bytes) -> None:
        """Now, as far as there is room, and the rest later."""
        if not self.is_open:
            return
        is_behind = bool(self._unsent)
        self._unsent += frame(body)
        if not is_behind:
            self._read_s = time.monotonic()
            self.flush()

    def flush(self) -> None:
        try:
            sent = self._sock.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.close()
            return
        if sent:
            self._read_s = time.monotonic()
            del self._unsent[:sent]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        if self._selector.get_key(self._sock).events != wanted:
            self._selector.modify(self._sock, wanted, self)

    def close(self) -> None:
        if self.is_open:
            self._selector.unregister(self._sock)
            self._sock.close()
        self._unsent.clear()
