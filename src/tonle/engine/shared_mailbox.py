"""`SharedMailbox`: the loop's end of many sockets, where several fronts share one engine.

Does: accept fronts, keep their handles apart, split each step between them, cancel what a lost front had under way.
Does not: start or watch processes; wait for a front that does not read.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time

import msgspec

from tonle.child.frames import FrameError, Frames, frame
from tonle.engine.messages import Cancel, LoopStats, ModelCard, Step, Stop, Submit, ToEngine, ToFront

log = logging.getLogger("tonle.engine")

_SHIFT = 40  # bits of a front's own handles; the number of its connection stands above them
_MASK = (1 << _SHIFT) - 1
_READ_BYTES = 1 << 20
_MAX_BEHIND_BYTES = 64 * 2**20  # unread by a front; one that is further behind hangs, and is cut off
_NEWS_S = 0.1  # a front without tokens hears of the engine's state this often


class _Connection:
    """One front's socket, and what it has under way."""

    def __init__(self, number: int, sock: socket.socket) -> None:
        self.number = number
        self.sock = sock
        self.frames = Frames()
        self.unsent = bytearray()
        self.handles: set[int] = set()  # numbered
        self.told_s = 0.0  # when it last got the statistics

    @property
    def is_open(self) -> bool:
        return self.sock.fileno() >= 0


class SharedMailbox:
    """A `Mailbox`. `control` is the control socket of this process: when it closes, that reads as `Stop`."""

    def __init__(self, control: socket.socket, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._connections: dict[int, _Connection] = {}
        self._num_connections = 0  # ever: a number is not used twice, so late tokens reach no other front
        self._card: ModelCard | None = None  # for fronts that connect later
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._control = self._open(control)

    # -- in

    def take(self, wait_s: float | None) -> list[ToEngine]:
        mail = self._lost()  # closed while we wrote to it
        for key, events in self._selector.select(0.0 if mail else wait_s):
            connection: _Connection | None = key.data
            if connection is None:
                self._accept()
                continue
            if events & selectors.EVENT_READ:
                mail += self._read(connection)
            if events & selectors.EVENT_WRITE and connection.is_open:
                self._flush(connection)
        return [*mail, *self._lost()]

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:  # the front has left already
            return
        connection = self._open(sock)
        if self._card is not None:
            self._send(connection, frame(self._encode(self._card)))

    def _open(self, sock: socket.socket) -> _Connection:
        sock.setblocking(False)
        self._num_connections += 1
        connection = self._connections[self._num_connections] = _Connection(self._num_connections, sock)
        self._selector.register(sock, selectors.EVENT_READ, connection)
        return connection

    def _read(self, connection: _Connection) -> list[ToEngine]:
        try:
            data = connection.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self._close(connection)
            return []
        try:
            bodies = connection.frames.feed(data)
        except FrameError as error:
            log.error("a front is cut off: %s", error)
            self._close(connection)
            return []
        return [self._number_handles(self._decoder.decode(body), connection) for body in bodies]

    def _number_handles(self, message: ToEngine, connection: _Connection) -> ToEngine:
        """Handles with the connection's number above them."""
        above = connection.number << _SHIFT
        if isinstance(message, Submit):
            for request in message.requests:
                request.handle |= above
                connection.handles.add(request.handle)
        elif isinstance(message, Cancel):
            message.handles = [handle | above for handle in message.handles]
            connection.handles.difference_update(message.handles)
        return message

    def _close(self, connection: _Connection) -> None:
        self._selector.unregister(connection.sock)
        connection.sock.close()
        connection.unsent.clear()

    def _lost(self) -> list[ToEngine]:
        """What is left to do for connections that closed since the last call."""
        mail: list[ToEngine] = []
        for connection in [connection for connection in self._connections.values() if not connection.is_open]:
            del self._connections[connection.number]
            if connection.handles:
                log.warning("a front is gone; %d of its requests are cancelled", len(connection.handles))
                mail.append(Cancel(list(connection.handles)))
            if connection is self._control:
                mail.append(Stop())
        return mail

    # -- out

    def publish(self, message: ToFront) -> None:
        if isinstance(message, Step):
            self._publish_step(message)
            return
        if isinstance(message, ModelCard):
            self._card = message
        data = frame(self._encode(message))
        for connection in self._connections.values():
            self._send(connection, data)

    def _publish_step(self, step: Step) -> None:
        now = time.monotonic()
        idle = step.stats.num_running + step.stats.num_waiting == 0
        news: bytes | None = None
        parts = split(step)
        for connection in self._connections.values():
            part = parts.get(connection.number)
            if part is not None:
                connection.handles.difference_update(
                    handle | connection.number << _SHIFT for handle in (*part.finished, *part.refused)
                )
                data = frame(self._encode(part))
            elif idle or now - connection.told_s >= _NEWS_S:
                data = news = news or frame(self._encode(Step([], [], [], stats=step.stats)))
            else:
                continue
            connection.told_s = now
            self._send(connection, data)

    def _send(self, connection: _Connection, data: bytes) -> None:
        if not connection.is_open:
            return
        is_behind = bool(connection.unsent)
        connection.unsent += data
        if not is_behind:
            self._flush(connection)
        if len(connection.unsent) > _MAX_BEHIND_BYTES:
            log.error("a front has not read %d MiB; it is cut off", len(connection.unsent) >> 20)
            self._close(connection)

    def _flush(self, connection: _Connection) -> None:
        try:
            sent = connection.sock.send(connection.unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._close(connection)
            return
        del connection.unsent[:sent]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if self._selector.get_key(connection.sock).events != wanted:
            self._selector.modify(connection.sock, wanted, connection)


def split(step: Step) -> dict[int, Step]:
    """By connection number, with the handles its front knows. Every part carries the statistics of the whole."""
    parts: dict[int, Step] = {}

    def part(handle: int) -> Step:
        found = parts.get(handle >> _SHIFT)
        if found is None:
            found = parts[handle >> _SHIFT] = _empty(step.stats)
        return found

    offset = 0
    for handle, count in zip(step.handles, step.counts, strict=True):
        own = part(handle)
        own.handles.append(handle & _MASK)
        own.counts.append(count)
        own.tokens += step.tokens[offset : offset + count]
        offset += count
    for name in ("finished", "refused", "started", "logprobs", "prompt_logprobs"):
        for handle, value in getattr(step, name).items():
            getattr(part(handle), name)[handle & _MASK] = value
    return parts


def _empty(stats: LoopStats) -> Step:
    return Step([], [], [], {}, {}, {}, {}, {}, stats)
