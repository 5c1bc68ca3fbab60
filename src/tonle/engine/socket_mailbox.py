"""`SocketMailbox`: the loop's end of the sockets to its fronts: one, the parent of this process, or many that share an engine.

Does: accept fronts, keep their handles apart, split each step between them, cancel what a front had under way that is lost
or does not read. Does not: start or watch processes; wait for a front.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time

import msgspec

from tonle.child.frames import FrameError
from tonle.child.open_files import describe
from tonle.engine.messages import (
    AdapterReply,
    Adapters,
    Cancel,
    LoadAdapter,
    LoopStats,
    ModelCard,
    Step,
    Stop,
    Submit,
    ToEngine,
    ToFront,
    UnloadAdapter,
)
from tonle.engine.peer import Peer
from tonle.telemetry.time_spent import OtherPrompt, TimeSpent

log = logging.getLogger("tonle.engine")

_SHIFT = 40  # bits of a front's own handles; the number of its connection stands above them
_MASK = (1 << _SHIFT) - 1
_NEWS_S = 0.1  # a front without tokens hears of the engine's state this often


class SocketMailbox:
    """A `Mailbox`. `control` is the control socket of this process: when it closes, that reads as `Stop`.

    Without a `listener`, the parent is the only front. With one, fronts connect there.
    """

    def __init__(self, control: socket.socket, listener: socket.socket | None = None) -> None:
        self._listener = listener
        self._peers: dict[int, Peer] = {}
        self._num_peers = 0  # ever: a number is not used twice, so late tokens reach no other front
        self._card: ModelCard | None = None  # for fronts that connect later,
        self._adapters: Adapters | None = None  # who get this first
        self._stats = LoopStats()  # the latest
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._selector = selectors.DefaultSelector()
        if listener is not None:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        self._control = self._open(control)

    # -- in

    def take(self, wait_s: float | None) -> list[ToEngine]:
        mail = self._leftovers()  # of peers that closed, or fell behind, while we wrote to them
        for key, events in self._selector.select(0.0 if mail else wait_s):
            peer: Peer | None = key.data
            if peer is None:
                self._accept()
                continue
            if events & selectors.EVENT_READ:
                mail += self._read(peer)
            if events & selectors.EVENT_WRITE and peer.is_open:
                peer.flush()
                self._welcome_back(peer)
        return [*mail, *self._leftovers()]

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:  # the front has left already
            return
        except OSError as error:  # no descriptors: it waits in the queue of the listener
            log.error("a front cannot be accepted: %s", describe(error))
            return
        peer = self._open(sock)
        for message in (self._adapters, self._card):
            if message is not None:
                peer.send(self._encode(message))

    def _open(self, sock: socket.socket) -> Peer:
        peer = self._peers[self._num_peers] = Peer(self._num_peers, sock, self._selector)
        self._num_peers += 1
        return peer

    def _read(self, peer: Peer) -> list[ToEngine]:
        try:
            bodies = peer.read()
        except FrameError as error:
            log.error("a front is cut off: %s", error)
            peer.close()
            return []
        mail = [self._number_handles(self._decoder.decode(body), peer) for body in bodies]
        if not peer.is_hung:
            return mail
        for message in mail:  # it hangs, but its last requests are only now read
            if isinstance(message, Submit):
                peer.owed |= peer.handles
                peer.handles.clear()
        return [message for message in mail if not isinstance(message, Submit)]

    def _number_handles(self, message: ToEngine, peer: Peer) -> ToEngine:
        """Handles with the connection's number above them."""
        above = peer.number << _SHIFT
        if isinstance(message, Submit):
            for request in message.requests:
                request.handle |= above
                peer.handles.add(request.handle)
        elif isinstance(message, Cancel):
            message.handles = [handle | above for handle in message.handles]
            peer.handles.difference_update(message.handles)
        elif isinstance(message, LoadAdapter | UnloadAdapter):
            message.reply |= above
        return message

    # -- fronts that are gone, or do not read

    def _leftovers(self) -> list[ToEngine]:
        """What is left to do for fronts that were lost or fell behind since the last call."""
        mail: list[ToEngine] = []
        for peer in list(self._peers.values()):
            if not peer.is_open:
                mail += self._remove(peer)
            elif peer.has_unsent and not peer.is_hung and peer.is_too_far_behind(time.monotonic()):
                mail += self._suspend(peer)
        return mail

    def _remove(self, peer: Peer) -> list[ToEngine]:
        mail: list[ToEngine] = []
        del self._peers[peer.number]
        if peer.handles:
            log.warning("a front is gone; %d of its requests are cancelled", len(peer.handles))
            mail.append(Cancel(sorted(peer.handles)))
        if peer is self._control:
            mail.append(Stop())
        return mail

    def _suspend(self, peer: Peer) -> list[ToEngine]:
        """It gets nothing more, and nothing is computed for it, until it has read what is held for it."""
        log.error("a front does not read its answers; %d of its requests are cancelled", len(peer.handles))
        peer.is_hung = True
        peer.owed, peer.handles = peer.handles, set()
        return [Cancel(sorted(peer.owed))] if peer.owed else []

    def _welcome_back(self, peer: Peer) -> None:
        """A front that hung and has read all that was held for it learns what it missed."""
        if not peer.is_hung or peer.has_unsent or not peer.is_open:
            return
        log.warning("a front reads again")
        peer.is_hung = False
        ended: dict[int, tuple[str, int | None]] = {handle & _MASK: ("cancelled", None) for handle in peer.owed}
        peer.owed = set()
        peer.send(self._encode(Step([], [], [], finished=ended, stats=self._stats)))

    # -- out

    def publish(self, message: ToFront) -> None:
        """Returns at once, whatever the fronts do."""
        if isinstance(message, Step):
            self._publish_step(message)
            return
        if isinstance(message, AdapterReply):
            self._publish_reply(message)
            return
        if isinstance(message, ModelCard):
            self._card = message
        elif isinstance(message, Adapters):
            self._adapters = message
        body = self._encode(message)
        for peer in self._peers.values():
            peer.send(body)

    def _publish_reply(self, message: AdapterReply) -> None:
        """To the front that asked, if it is still there."""
        if (peer := self._peers.get(message.reply >> _SHIFT)) is not None:
            message.reply &= _MASK
            peer.send(self._encode(message))

    def _publish_step(self, step: Step) -> None:
        self._stats = step.stats
        if self._listener is None:
            self._send_step(self._control, step)
            return
        now = time.monotonic()
        idle = step.stats.num_running + step.stats.num_waiting == 0
        news = Step([], [], [], stats=step.stats)
        parts = split(step)
        for peer in self._peers.values():
            part = parts.get(peer.number)
            if part is not None or idle or now - peer.told_s >= _NEWS_S:
                peer.told_s = now
                self._send_step(peer, part or news)

    def _send_step(self, peer: Peer, step: Step) -> None:
        """`step` has the handles as the front knows them."""
        above = peer.number << _SHIFT
        peer.handles.difference_update(handle | above for handle in (*step.finished, *step.refused))
        if not peer.is_hung:
            peer.send(self._encode(step))


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
    for name in ("finished", "refused", "started", "logprobs", "prompt_logprobs", "embeddings", "kept", "guesses"):
        for handle, value in getattr(step, name).items():
            getattr(part(handle), name)[handle & _MASK] = value
    for handle, spent in step.spent.items():
        part(handle).spent[handle & _MASK] = _as_told_to(handle >> _SHIFT, spent)
    return parts


def _empty(stats: LoopStats) -> Step:
    return Step([], [], [], {}, {}, {}, {}, {}, {}, {}, {}, {}, stats)


def _as_told_to(number: int, spent: TimeSpent) -> TimeSpent:
    """With the handles that the front of this connection knows. Requests of other fronts have none."""

    def own(prompts: list[OtherPrompt]) -> list[OtherPrompt]:
        return [
            msgspec.structs.replace(each, handle=each.handle & _MASK if each.handle >> _SHIFT == number else 0)
            for each in prompts
        ]

    if not spent.behind and not spent.stalled_by:
        return spent
    return msgspec.structs.replace(spent, behind=own(spent.behind), stalled_by=own(spent.stalled_by))
