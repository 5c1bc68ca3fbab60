"""Notice that the other side of a socket is gone, without reading from it.

Does: wait on a thread for the first of some sockets whose other side closed it or died. Does not: read: messages are left to
whoever else uses the sockets.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Sequence


class Watch:
    """Made by `when_gone`."""

    def __init__(self, sockets: Sequence[socket.socket], call: Callable[[int], object]) -> None:
        self._call = call
        self._wake, self._woken = socket.socketpair()
        self._places = {sock.fileno(): place for place, sock in enumerate(sockets)}
        self._poll = select.poll()
        for sock in (self._woken, *sockets):
            self._poll.register(sock, 0)  # no events but that of a hang-up, which is always told
        self._thread = threading.Thread(target=self._run, name="tonle-hang-up", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Until somebody is gone and that was told, at most so long."""
        self._thread.join(timeout_s)

    def stop(self) -> None:
        """Watch no more; the sockets may be closed after this. If one's other side is gone already, that is still told, before
        this returns. Harmless if repeated."""
        self._wake.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        gone = [self._places[number] for number, _ in self._poll.poll() if number in self._places]
        self._woken.close()
        if gone:  # else it was only stopped
            self._call(gone[0])


def when_gone(sockets: Sequence[socket.socket], call: Callable[[int], object]) -> Watch:
    """Call once, on a thread of its own, with the place of the first socket whose other side is gone."""
    return Watch(sockets, call)
