"""`PostOffice`: the loop's end of many sockets, where several fronts share one engine.

Does: accept fronts, keep their handles apart, split each step between them, cancel what a lost front had under way.
Does not: start or watch processes; wait for a front that does not read.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time

import msgspec

from tonle.engine.mailbox import Frames, frame
from tonle.engine.messages import Cancel, LoopStats, ModelCard, Step, Stop, Submit, ToEngine, ToFront

log = logging.getLogger("tonle.engine")

_SHIFT = 40  # bits of a front's own handles; a line's number stands above them
_MASK = (1 << _SHIFT) - 1
_READ_BYTES = 1 << 20
_MAX_BEHIND_BYTES = 64 * 2**20  # unread by a front; one that is further behind hangs, and is cut off
_NEWS_S = 0.1  # a front without tokens hears of the engine's state this often


class _Line:
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


class PostOffice:
    """A `Mailbox`. `keeper` is the line of whoever watches over this process; when it closes, that reads as `Stop`."""

    def __init__(self, keeper: socket.socket, entrance: socket.socket) -> None:
        entrance.setblocking(False)
        self._entrance = entrance
        self._lines: dict[int, _Line] = {}
        self._num_lines = 0  # ever: a number is not used twice, so late mail finds nobody
        self._card: ModelCard | None = None  # for those who come later
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._selector = selectors.DefaultSelector()
        self._selector.register(entrance, selectors.EVENT_READ)
        self._keeper = self._open(keeper)

    # -- in

    def take(self, wait_s: float | None) -> list[ToEngine]:
        mail = self._lost()  # closed while we wrote to it
        for key, events in self._selector.select(0.0 if mail else wait_s):
            line: _Line | None = key.data
            if line is None:
                self._admit()
                continue
            if events & selectors.EVENT_READ:
                mail += self._read(line)
            if events & selectors.EVENT_WRITE and line.is_open:
                self._flush(line)
        return [*mail, *self._lost()]

    def _admit(self) -> None:
        try:
            sock, _ = self._entrance.accept()
        except BlockingIOError:  # whoever knocked has left
            return
        line = self._open(sock)
        if self._card is not None:
            self._send(line, frame(self._card, self._encoder))

    def _open(self, sock: socket.socket) -> _Line:
        sock.setblocking(False)
        self._num_lines += 1
        line = self._lines[self._num_lines] = _Line(self._num_lines, sock)
        self._selector.register(sock, selectors.EVENT_READ, line)
        return line

    def _read(self, line: _Line) -> list[ToEngine]:
        try:
            data = line.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self._close(line)
            return []
        return [self._sign(self._decoder.decode(body), line) for body in line.frames.feed(data)]

    def _sign(self, message: ToEngine, line: _Line) -> ToEngine:
        """Handles with the line's number above them."""
        above = line.number << _SHIFT
        if isinstance(message, Submit):
            for request in message.requests:
                request.handle |= above
                line.handles.add(request.handle)
        elif isinstance(message, Cancel):
            message.handles = [handle | above for handle in message.handles]
            line.handles.difference_update(message.handles)
        return message

    def _close(self, line: _Line) -> None:
        self._selector.unregister(line.sock)
        line.sock.close()
        line.unsent.clear()

    def _lost(self) -> list[ToEngine]:
        """What lines that closed since last time leave to be done."""
        mail: list[ToEngine] = []
        for line in [line for line in self._lines.values() if not line.is_open]:
            del self._lines[line.number]
            if line.handles:
                log.warning("a front is gone; %d of its requests are cancelled", len(line.handles))
                mail.append(Cancel(list(line.handles)))
            if line is self._keeper:
                mail.append(Stop())
        return mail

    # -- out

    def publish(self, message: ToFront) -> None:
        if isinstance(message, Step):
            self._publish_step(message)
            return
        if isinstance(message, ModelCard):
            self._card = message
        data = frame(message, self._encoder)
        for line in self._lines.values():
            self._send(line, data)

    def _publish_step(self, step: Step) -> None:
        now = time.monotonic()
        idle = step.stats.num_running + step.stats.num_waiting == 0
        news: bytes | None = None
        parts = split(step)
        for line in self._lines.values():
            part = parts.get(line.number)
            if part is not None:
                line.handles.difference_update(
                    handle | line.number << _SHIFT for handle in (*part.finished, *part.refused)
                )
                data = frame(part, self._encoder)
            elif idle or now - line.told_s >= _NEWS_S:
                data = news = news or frame(Step([], [], [], stats=step.stats), self._encoder)
            else:
                continue
            line.told_s = now
            self._send(line, data)

    def _send(self, line: _Line, data: bytes) -> None:
        if not line.is_open:
            return
        is_behind = bool(line.unsent)
        line.unsent += data
        if not is_behind:
            self._flush(line)
        if len(line.unsent) > _MAX_BEHIND_BYTES:
            log.error("a front has not read %d MiB; it is cut off", len(line.unsent) >> 20)
            self._close(line)

    def _flush(self, line: _Line) -> None:
        try:
            sent = line.sock.send(line.unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._close(line)
            return
        del line.unsent[:sent]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.unsent else 0)
        if self._selector.get_key(line.sock).events != wanted:
            self._selector.modify(line.sock, wanted, line)


def split(step: Step) -> dict[int, Step]:
    """By line number, with the handles its front knows. Every part carries the statistics of the whole."""
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
