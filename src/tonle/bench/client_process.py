"""One client in a process of its own.

    python -m tonle.bench.client_process CONTROL_FD         # started by `ClientProcesses`, never by hand

This process ends when its control socket closes. Messages are pickles: both ends are the same program, and the socket
has no name.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import traceback
from pathlib import Path

from tonle.bench.client import Client, LevelTask, Share
from tonle.bench.client_messages import ClientSettings, Done, Failed, Go, Ready, Samples, Stop
from tonle.bench.measure import Sample
from tonle.bench.shared_counter import SharedCounter
from tonle.bench.underway import UnderwayCounts
from tonle.child.frames import FrameProtocol, frame
from tonle.child.open_files import raise_limit
from tonle.child.spawn import ignore_signals, inherited_sockets, read_settings
from tonle.edge.listening import run

BATCH_S = 0.25  # between batches of samples: often enough for a progress display


class _Process:
    """Owns the client and the messages in and out."""

    def __init__(self, settings: ClientSettings) -> None:
        counter = SharedCounter(Path(settings.counter))
        share = Share(settings.place, settings.count)
        self._client = Client(pickle.loads(settings.options), share=share, take=counter.take)
        self._inbox: asyncio.Queue[object] = asyncio.Queue()  # None: the parent is gone
        self._transport: asyncio.WriteTransport | None = None
        self._driving: asyncio.Task[None] | None = None
        self._batch: list[Sample] = []
        self._counts = UnderwayCounts()  # last said

    async def run(self, control: socket.socket) -> None:
        self._transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: FrameProtocol(self._receive, self._lost), sock=control
        )
        with contextlib.suppress(asyncio.CancelledError):
            while (message := await self._inbox.get()) is not None:
                try:
                    await self._obey(message)
                except Exception:
                    self._say(Failed(traceback.format_exc(limit=-3)))
        await self._client.close()

    def _receive(self, body: bytes) -> None:
        message = pickle.loads(body)
        if isinstance(message, Stop):
            self._stop()
        else:
            self._inbox.put_nowait(message)

    def _lost(self) -> None:
        self._stop()
        self._inbox.put_nowait(None)

    def _stop(self) -> None:
        if self._driving is not None:
            self._driving.cancel()

    def _say(self, message: object) -> None:
        if self._transport is not None:
            self._transport.write(frame(pickle.dumps(message)))

    async def _obey(self, message: object) -> None:
        if isinstance(message, LevelTask):
            await self._client.prepare(message)
            self._say(Ready())
        elif isinstance(message, Go):
            await self._drive(message.begin_s)

    async def _drive(self, begin_s: float) -> None:
        reconnects = self._client.reconnects
        self._driving = asyncio.create_task(self._client.drive(self._keep, begin_s))
        sending = asyncio.create_task(self._send_batches())
        try:
            with contextlib.suppress(asyncio.CancelledError):  # told to stop: what was measured counts
                await self._driving
        finally:
            self._driving = None
            sending.cancel()
        self._send_batch()
        uses = self._client.uses()
        self._say(Done(uses[0] if uses else None, self._client.reconnects - reconnects))

    def _keep(self, sample: Sample) -> None:
        self._batch.append(sample)

    async def _send_batches(self) -> None:
        while True:
            await asyncio.sleep(BATCH_S)
            self._send_batch()

    def _send_batch(self) -> None:
        counts = self._client.underway()
        if self._batch or counts != self._counts:
            self._say(Samples(self._batch, counts))
            self._batch, self._counts = [], counts


def main() -> None:
    ignore_signals()
    raise_limit()
    (control,) = inherited_sockets()
    settings = read_settings(control, ClientSettings)
    run(_Process(settings).run(control))


if __name__ == "__main__":
    main()
