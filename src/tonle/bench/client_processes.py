"""`ClientProcesses`: several clients, each in a process of its own, as one `Sender`. Python reads some 60,000 chunks per second
and process; a GPU writes more.

Does: start the processes, hand each its share of every level, merge their samples. Does not: send requests itself; what happens
in a child is `client_process.py`. Moments come from the system's monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import subprocess
from time import perf_counter

from tonle.bench.client import LevelTask
from tonle.bench.client_messages import ClientSettings, Done, Failed, Go, Ready, Samples, Stop
from tonle.bench.drive import Keep
from tonle.bench.measure import ClientUse, Sample
from tonle.bench.options import BenchOptions
from tonle.bench.shared_counter import SharedCounter
from tonle.bench.underway import UnderwayCounts
from tonle.child.frames import FrameProtocol, frame
from tonle.child.spawn import exit_reason, spawn
from tonle.errors import ConfigError, InternalError

MODULE = "tonle.bench.client_process"
LEAD_S = 0.1  # from "go" to the first moment of an open loop: every process has heard it by then
STOP_S = 10.0  # for samples of requests that a stop cut off


class ClientProcesses:
    """Owns the processes and the counter that deals out jobs."""

    def __init__(self, options: BenchOptions) -> None:
        self._options = options
        self._counter: SharedCounter | None = None  # with the first level
        self._children: list[_Child] = []
        self._task: LevelTask | None = None
        self._done: list[Done] = []
        self._reconnects = 0

    @property
    def reconnects(self) -> int:
        return self._reconnects

    def uses(self) -> list[ClientUse]:
        return [done.use for done in self._done if done.use is not None]

    def underway(self) -> UnderwayCounts:
        return sum((child.underway for child in self._children), UnderwayCounts())

    async def prepare(self, task: LevelTask) -> None:
        if self._counter is None:
            self._counter = SharedCounter.create()
            await self._start(self._counter)
        self._task, self._done = task, []
        self._counter.reset()
        message = pickle.dumps(task)
        for child in self._children:
            child.is_done = False
            child.write(message)
        for child in self._children:
            while not isinstance(await child.next(), Ready):
                pass  # what a stopped level left

    async def drive(self, keep: Keep) -> None:
        assert self._task is not None, "a level is prepared before it is driven"
        num_kept = 0

        def count(sample: Sample) -> None:
            nonlocal num_kept
            num_kept += not sample.turn  # later turns of a conversation are no jobs of their own
            keep(sample)

        self._tell(Go(perf_counter() + LEAD_S))
        try:
            await self._collect(count)
        except asyncio.CancelledError:
            self._tell(Stop())
            with contextlib.suppress(TimeoutError, InternalError):
                async with asyncio.timeout(STOP_S):
                    await self._collect(count)
            raise
        finally:
            self._reconnects += sum(done.reconnects for done in self._done)
        self._task.workload.pass_over(num_kept)

    async def close(self) -> None:
        await asyncio.gather(*(child.close() for child in self._children))
        if self._counter is not None:
            self._counter.remove()

    async def _start(self, counter: SharedCounter) -> None:
        count = self._options.processes
        options = pickle.dumps(self._options)
        try:
            for place in range(count):
                settings = ClientSettings(place=place, count=count, counter=str(counter.path), options=options)
                process, control = spawn(MODULE, settings)
                child = _Child(process)
                self._children.append(child)
                await child.connect(control)
        except OSError as error:
            raise ConfigError(f"cannot start {count} client processes: {error}", param="processes") from None

    def _tell(self, message: object) -> None:
        for child in self._children:
            child.write(pickle.dumps(message))

    async def _collect(self, keep: Keep) -> None:
        await asyncio.gather(*(self._collect_one(child, keep) for child in self._children if not child.is_done))

    async def _collect_one(self, child: _Child, keep: Keep) -> None:
        while not child.is_done:
            message = await child.next()
            if isinstance(message, Samples):
                child.underway = message.underway
                for sample in message.samples:
                    keep(sample)
            elif isinstance(message, Done):
                child.is_done = True
                self._done.append(message)


class _Child:
    """One client process, as its parent sees it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.is_done = False  # with the level
        self.underway = UnderwayCounts()  # as it last said
        self._messages: asyncio.Queue[object] = asyncio.Queue()  # None: its end of the socket is closed
        self._transport: asyncio.WriteTransport | None = None

    async def connect(self, control: socket.socket) -> None:
        def receive(body: bytes) -> None:
            self._messages.put_nowait(pickle.loads(body))

        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_connection(
            lambda: FrameProtocol(receive, lambda: self._messages.put_nowait(None)), sock=control
        )

    def write(self, body: bytes) -> None:
        if self._transport is not None:
            self._transport.write(frame(body))

    async def next(self) -> object:
        """What it says next. Raises `InternalError` if it is gone, or has failed."""
        message = await self._messages.get()
        if message is None:
            self._messages.put_nowait(None)
            reason = await asyncio.to_thread(exit_reason, self.process)
            raise InternalError(f"a process of the benchmark's client ended: {reason}")
        if isinstance(message, Failed):
            raise InternalError(f"a process of the benchmark's client failed: {message.reason}")
        return message

    async def close(self) -> None:
        if self._transport is not None:
            self._transport.close()  # the sign to end
        await asyncio.to_thread(exit_reason, self.process)
