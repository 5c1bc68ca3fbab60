"""The engine in a process of its own: started, read, noticed when it dies, started again.

Run as `python -m tonle.engine.process FD [ENTRANCE_FD]`, it is that process: the first frame on the socket names the
model and the settings, everything after that is mail. With an entrance, fronts of other processes come in there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time

import msgspec

from tonle.config.engine import EngineConfig
from tonle.engine.child import epitaph, order_frame, read_order, spawn
from tonle.engine.link import Reader, Receiver
from tonle.engine.mailbox import Mailbox, SocketMailbox, frame
from tonle.engine.messages import Failed, ModelCard, Stop, ToEngine, ToFront
from tonle.engine.post_office import PostOffice
from tonle.errors import CallerError, EngineDied
from tonle.models.source import ModelSource
from tonle.telemetry import logs

log = logging.getLogger("tonle.engine")

_MAX_BACKOFF_S = 30.0
_STEADY_S = 60.0  # an engine that lived this long gets a fresh start when it dies


class EngineProcess:
    """Owns the engine's process. Give `send` to a `Front`, then `start(front)`.

    `entrance` is a listening Unix socket where more fronts reach the engine; it stays ours when an engine dies.
    """

    def __init__(self, source: ModelSource, config: EngineConfig, *, entrance: socket.socket | None = None) -> None:
        self.num_starts = 0
        self._source = source
        self._config = config
        self._entrance = entrance
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._first: asyncio.Future[None] | None = None  # settled by the first ready or failed
        self._keeper: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()
        self._stopping = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def send(self, message: ToEngine) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message, self._encoder))

    async def start(self, front: Receiver) -> None:
        """Start it and keep it running. Returns at once; `wait_ready` waits for the model."""
        self._first = asyncio.get_running_loop().create_future()
        await self._spawn(front)
        self._keeper = asyncio.create_task(self._keep(front))

    async def wait_ready(self) -> None:
        """Until the first engine is ready; raises what kept it from starting."""
        assert self._first is not None
        await asyncio.shield(self._first)

    async def stop(self) -> None:
        """End the process: ask, then insist."""
        self._stopping = True
        if self._keeper is not None:
            self._keeper.cancel()
        self.send(Stop())
        process = self._process
        if process is not None:
            if self._first is not None and not self._first.done():
                process.kill()  # it is loading, and reads no mail
            try:
                await asyncio.to_thread(process.wait, 5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._transport is not None:
            self._transport.close()

    async def _spawn(self, front: Receiver) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            more = [] if self._entrance is None else [self._entrance]
            self._process = spawn("tonle.engine.process", theirs, *more)
        self.num_starts += 1
        self._lost.clear()
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_connection(
            lambda: Reader(lambda message: self._receive(message, front), self._lost.set), sock=ours
        )
        self._transport.write(order_frame(Order(self._source, self._config, logs.level(), logs.is_json())))

    async def _keep(self, front: Receiver) -> None:
        """Whenever the process is lost: tell the front, wait a little longer each time, start it again."""
        backoff_s = 0.5
        while True:
            began = time.monotonic()
            await self._lost.wait()
            assert self._process is not None
            error = EngineDied(await epitaph(self._process))
            front.lose(error)
            assert self._first is not None
            if not self._first.done():
                self._first.set_exception(error)
                return
            if time.monotonic() - began > _STEADY_S:
                backoff_s = 0.5
            log.error("the engine died (%s); starting it again in %.1f s", error.message, backoff_s)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            await self._spawn(front)

    def _receive(self, message: ToFront, front: Receiver) -> None:
        assert self._first is not None
        front.deliver(message)
        if isinstance(message, ModelCard):
            if self.num_starts > 1:
                log.info("the engine is back after %.1f s of loading", message.load_s)
            if not self._first.done():
                self._first.set_result(None)
        elif isinstance(message, Failed) and not self._first.done():
            self._first.set_exception(message.error)


# -- the other side


class Order(msgspec.Struct):
    source: ModelSource
    config: EngineConfig
    log_level: str
    log_json: bool


def main(line: socket.socket, entrance: socket.socket | None = None) -> int:
    """The engine's process: build what the first frame names, then run the loop until told to stop."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they go to all of a terminal or a service; the front decides
        signal.signal(number, signal.SIG_IGN)
    # torch's threads would spin between its operations, on cores that our own kernels and the HTTP process need.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    order = read_order(line, Order)
    logs.configure(order.log_level, json=order.log_json)
    mailbox: Mailbox = SocketMailbox(line) if entrance is None else PostOffice(line, entrance)
    try:
        from tonle.engine.build import build

        loop, card = build(order.source, order.config, mailbox)
    except CallerError as error:
        mailbox.publish(Failed(error.message, caller_fault=True))
        return 1
    except Exception as error:
        log.exception("the engine could not start")
        mailbox.publish(Failed(f"{type(error).__name__}: {error}", caller_fault=False))
        return 1
    mailbox.publish(card)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the front is gone, so is our purpose
        loop.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(*(socket.socket(fileno=int(number)) for number in sys.argv[1:])))
