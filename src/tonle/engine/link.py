"""`EngineLink`: the connection of a front that shares its engine with others.

Does: connect to the engine's address, and again whenever the connection is lost. Does not: start the engine (`process.py`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

import msgspec

from tonle.child.frames import FrameProtocol, frame
from tonle.engine.messages import Submit, ToEngine, ToFront
from tonle.errors import EngineDied, EngineRestarting, TonleError

log = logging.getLogger("tonle.engine")

MAX_UNREAD_BYTES = 64 * 2**20  # of mail that an engine has not read: it hangs
_RETRY_S = 0.1


class Receiver(Protocol):
    """Gets what an engine sends, and hears when it is lost: a `Front`, or the parent of fronts in other processes."""

    def deliver(self, message: ToFront) -> None: ...
    def lose(self, error: TonleError) -> None: ...


def check_reads(message: ToEngine, num_unread: int) -> None:
    """Raise `EngineRestarting` for a request to an engine that does not read: sending never waits, so it would pile up."""
    if num_unread > MAX_UNREAD_BYTES and isinstance(message, Submit):
        raise EngineRestarting("the engine does not take requests at the moment; try again shortly", retry_after_s=5)


class EngineLink:
    """Owns one connection to the engine at `address`, a Unix socket. Give `send` to a `Front`, then `start(front)`."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._transport: asyncio.Transport | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._task: asyncio.Task[None] | None = None

    def send(self, message: ToEngine) -> None:
        """Never waits. Raises `EngineRestarting` if the engine does not read."""
        if self._transport is not None and not self._transport.is_closing():
            check_reads(message, self._transport.get_write_buffer_size())
            self._transport.write(frame(self._encoder.encode(message)))

    def start(self, front: Receiver) -> None:
        self._task = asyncio.create_task(self._stay_connected(front))

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._transport is not None:
            self._transport.close()

    async def _stay_connected(self, front: Receiver) -> None:
        """The listening socket outlives the engine: without one, we wait in its queue for the next."""
        loop = asyncio.get_running_loop()
        decode = msgspec.msgpack.Decoder(ToFront).decode
        while True:
            lost = asyncio.Event()
            try:
                self._transport, _ = await loop.create_unix_connection(
                    lambda lost=lost: FrameProtocol(lambda body: front.deliver(decode(body)), lost.set),  # type: ignore[misc]
                    self._address,
                )
                await lost.wait()
                log.warning("the connection to the engine is lost")
            except OSError as error:
                log.error("the engine cannot be reached (%s)", error)
            front.lose(EngineDied("its process ended"))
            await asyncio.sleep(_RETRY_S)
