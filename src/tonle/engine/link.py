"""A front's end of a socket to an engine.

`Reader` turns its bytes into messages. `EngineLink` is the line of a front that shares the engine with others: it dials
the engine's address, and dials again whenever the line is lost. Does not: start the engine (`process.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

import msgspec

from tonle.engine.mailbox import Frames, frame
from tonle.engine.messages import ToEngine, ToFront
from tonle.errors import EngineDied, TonleError

log = logging.getLogger("tonle.engine")

_REDIAL_S = 0.1


class Receiver(Protocol):
    """Whoever hears from an engine: a `Front`, or a keeper of fronts in other processes."""

    def deliver(self, message: ToFront) -> None: ...
    def lose(self, error: TonleError) -> None: ...


class Reader(asyncio.Protocol):
    """Bytes from the engine's process to messages on the event loop."""

    def __init__(self, deliver: Callable[[ToFront], None], lost: Callable[[], None]) -> None:
        self._deliver = deliver
        self._lost = lost
        self._frames = Frames()
        self._decoder = msgspec.msgpack.Decoder(ToFront)

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            self._deliver(self._decoder.decode(body))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()


class EngineLink:
    """Owns one line to the engine at `address`, a Unix socket. Give `send` to a `Front`, then `start(front)`."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._transport: asyncio.Transport | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._dialer: asyncio.Task[None] | None = None

    def send(self, message: ToEngine) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message, self._encoder))

    def start(self, front: Receiver) -> None:
        self._dialer = asyncio.create_task(self._stay_connected(front))

    def stop(self) -> None:
        if self._dialer is not None:
            self._dialer.cancel()
        if self._transport is not None:
            self._transport.close()

    async def _stay_connected(self, front: Receiver) -> None:
        """The engine's address outlives the engine: while there is none, we stand in its queue until the next one."""
        loop = asyncio.get_running_loop()
        while True:
            lost = asyncio.Event()
            try:
                self._transport, _ = await loop.create_unix_connection(
                    lambda lost=lost: Reader(front.deliver, lost.set),  # type: ignore[misc]
                    self._address,
                )
                await lost.wait()
                log.warning("the line to the engine is lost")
            except OSError as error:
                log.error("the engine cannot be reached (%s)", error)
            front.lose(EngineDied("its process ended"))
            await asyncio.sleep(_REDIAL_S)
