"""`WorkerProcess`: the pool's side of one worker's process, from its start to its end.

Does: start it on its device, send and receive messages with their media, notice its end, end it. Does not: start another one
(`instance.py`), or know jobs.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Callable

import msgspec

from tonle.child.frames import FrameProtocol, frame
from tonle.child.spawn import abandon, spawn
from tonle.child.supervisor import STOP_S, wait_exit
from tonle.config.cores import num_cores
from tonle.telemetry import logs
from tonle.workers.builtin import kind_path
from tonle.workers.pool_config import PoolConfig
from tonle.workers.shared_media import Packer, Segment
from tonle.workers.worker_messages import FromWorker, ToWorker, WorkerSettings

_GPU_IDS = ("MIG-", "GPU-")  # names of devices, or parts of one, that only CUDA_VISIBLE_DEVICES takes


class WorkerProcess:
    def __init__(self, config: PoolConfig, device: str, receive: Callable[[FromWorker], None]) -> None:
        self._config = config
        self._device = device
        self._on_message = receive
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._media: socket.socket | None = None
        self._lost = asyncio.Event()
        self._decoder = msgspec.msgpack.Decoder(FromWorker)
        self._kill_timer: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def open(self) -> None:
        """Raises `OSError`."""
        device, variables = device_of(self._device, len(self._config.devices))
        settings = WorkerSettings(
            kind=kind_path(self._config.kind), pool=self._config.pool_name, model=self._config.model, device=device,
            options=self._config.options, log_level=logs.level(), log_json=logs.is_json(),
        )  # fmt: skip
        media, theirs = socket.socketpair()
        try:
            with theirs:
                process, control = spawn("tonle.workers.worker", settings, theirs, env={**os.environ, **variables})
            try:
                transport, _ = await asyncio.get_running_loop().create_connection(
                    lambda: FrameProtocol(self._receive, self._lost.set), sock=control
                )
            except BaseException:
                abandon(process, control)
                raise
        except BaseException:
            media.close()
            raise
        media.setblocking(False)
        self._process, self._transport, self._media = process, transport, media

    def send(self, message: ToWorker, packer: Packer | None = None) -> None:
        """Never waits. A worker that is gone already is noticed by `wait`. Raises `OSError` if there is no memory."""
        assert self._transport is not None and self._media is not None
        if self._transport.is_closing():
            return
        if packer is not None:
            try:
                packer.send(self._media)
            except ConnectionError:
                return
        self._transport.write(frame(msgspec.msgpack.encode(message)))

    def segment(self, num_bytes: int) -> Segment:
        """The media that belong to the message that has just come. Raises `OSError`."""
        assert self._media is not None
        return Segment(self._media, num_bytes)

    def request_stop(self, wait_s: float = STOP_S) -> None:
        """It ends after what it works on; it is killed if that takes longer than `wait_s`."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()
        if self._kill_timer is None:
            self._kill_timer = asyncio.get_running_loop().call_later(wait_s, self.kill)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        if self._transport is not None:
            self._transport.abort()  # a process of the worker's may hold the other end open

    async def wait(self) -> str:
        """Until it has ended; how, in words."""
        assert self._process is not None
        await self._lost.wait()
        return await wait_exit(self._process)

    async def end(self) -> None:
        """At once, if it has not ended; nothing of it is left afterwards."""
        if self._process is not None:
            self.kill()
            await wait_exit(self._process)
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        if self._media is not None:
            self._media.close()

    def _receive(self, body: bytes) -> None:
        self._on_message(self._decoder.decode(body))


def device_of(device: str, num_instances: int) -> tuple[str, dict[str, str]]:
    """What the kind is told, and variables of its process."""
    if device.startswith(_GPU_IDS):
        return "cuda:0", {"CUDA_VISIBLE_DEVICES": device}
    if (
        device == "cpu" and "OMP_NUM_THREADS" not in os.environ
    ):  # instances share the cores instead of fighting for them
        return device, {"OMP_NUM_THREADS": str(max(1, num_cores() // num_instances))}
    return device, {}
