"""The engine in a process of its own: started, read, noticed when it dies, started again.

Run as `python -m tonle.engine.process FD`, it is that process: the first frame on the socket names the model and the
settings, everything after that is mail.
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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from tonle.config.engine import EngineConfig
from tonle.engine.front import Front
from tonle.engine.mailbox import Frames, SocketMailbox, frame
from tonle.engine.messages import Failed, ModelCard, Stop, ToEngine, ToFront
from tonle.errors import CallerError, EngineDied
from tonle.models.source import ModelSource
from tonle.telemetry import logs

log = logging.getLogger("tonle.engine")

_MAX_BACKOFF_S = 30.0
_STEADY_S = 60.0  # an engine that lived this long gets a fresh start when it dies


class EngineProcess:
    """Owns the engine's process. Give `send` to a `Front`, then `start(front)`."""

    def __init__(self, source: ModelSource, config: EngineConfig) -> None:
        self.num_starts = 0
        self._source = source
        self._config = config
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

    async def start(self, front: Front) -> None:
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

    async def _spawn(self, front: Front) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - it only forks; talking is asynchronous
                [sys.executable, "-m", "tonle.engine.process", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        self.num_starts += 1
        self._lost.clear()
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_connection(lambda: _Reader(self, front), sock=ours)
        order = {
            "source": {"kind": self._source.kind, "path": str(self._source.path), "name": self._source.name},
            "config": asdict(self._config),
            "log_level": logging.getLevelName(logging.getLogger("tonle").getEffectiveLevel()),
            "log_json": logs.is_json(),
        }
        self._transport.write(frame(order, self._encoder))  # type: ignore[arg-type]

    async def _keep(self, front: Front) -> None:
        """Whenever the process is lost: tell the front, wait a little longer each time, start it again."""
        backoff_s = 0.5
        while True:
            began = time.monotonic()
            await self._lost.wait()
            error = EngineDied(await self._epitaph())
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

    async def _epitaph(self) -> str:
        process = self._process
        assert process is not None
        for _ in range(200):  # the socket closes a moment before the process can be reaped
            if (code := process.poll()) is not None:
                return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            await asyncio.sleep(0.01)
        process.kill()
        return "it closed its mailbox and hung"

    def _receive(self, message: ToFront, front: Front) -> None:
        assert self._first is not None
        front.deliver(message)
        if isinstance(message, ModelCard):
            if self.num_starts > 1:
                log.info("the engine is back after %.1f s of loading", message.load_s)
            if not self._first.done():
                self._first.set_result(None)
        elif isinstance(message, Failed) and not self._first.done():
            self._first.set_exception(front.failure or EngineDied(message.message))


class _Reader(asyncio.Protocol):
    """Bytes from the engine's process to messages on the event loop."""

    def __init__(self, owner: EngineProcess, front: Front) -> None:
        self._owner = owner
        self._front = front
        self._frames = Frames()
        self._decoder = msgspec.msgpack.Decoder(ToFront)

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            self._owner._receive(self._decoder.decode(body), self._front)

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner._lost.set()


# -- the other side


def main(fd: int) -> int:
    """The engine's process: build what the first frame names, then run the loop until told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal; the front decides
    # torch's threads would spin between its operations, on cores that our own kernels and the HTTP process need.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sock = socket.socket(fileno=fd)
    order = _first_frame(sock)
    logs.configure(order["log_level"], json=order["log_json"])
    mailbox = SocketMailbox(sock)
    source = ModelSource(**{**order["source"], "path": Path(order["source"]["path"])})
    try:
        from tonle.engine.build import build

        loop, card = build(source, EngineConfig(**order["config"]), mailbox)
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


def _first_frame(sock: socket.socket) -> dict[str, Any]:
    header = _read_exactly(sock, 4)
    body = _read_exactly(sock, int.from_bytes(header, "little"))
    order: dict[str, Any] = msgspec.msgpack.decode(body)
    return order


def _read_exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise SystemExit(0)
        data += part
    return data


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
