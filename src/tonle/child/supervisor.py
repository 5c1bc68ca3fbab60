"""`Supervisor`: one child process, started again whenever it dies.

Does: start it, notice its death, start it again after a pause, stop it. Does not: know what it is for: the owner is told
of its messages and of its death. Runs: on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tonle.child.frames import FrameProtocol, frame
from tonle.child.open_files import describe
from tonle.child.spawn import EXIT_S, abandon, code_reason, kill_late, killed_reason, spawn

STOP_S = 5.0  # for a child that was asked to stop
_POLL_S = 0.02  # a child whose socket is closed ends within a few of these


class Backoff:
    """The pause before the next start: twice as long each time, short again after a child that ran for a steady time."""

    def __init__(
        self,
        first_s: float,
        *,
        max_s: float = 30.0,
        steady_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first_s = self._next_s = first_s
        self._max_s = max_s
        self._steady_s = steady_s
        self._clock = clock
        self._started_s = clock()

    def started(self) -> None:
        self._started_s = self._clock()

    def next_s(self) -> float:
        """Call when the child has died."""
        if self._clock() - self._started_s > self._steady_s:
            self._next_s = self._first_s
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, self._max_s)
        return pause_s


class Supervisor:
    """Owns the child and its control connection. `start`, then `wait_ready`; at the end `stop`, or `request_stop` and `wait`.

    A child that dies before it was ever ready is not started again: `wait_ready` and `wait` raise what `on_exit` returned.
    """

    def __init__(
        self,
        name: str,
        module: str,
        settings: msgspec.Struct,
        *,
        receive: Callable[[bytes], bool],
        on_exit: Callable[[str], Exception],
        log: logging.Logger,
        backoff: Backoff,
        sockets: Sequence[socket.socket] = (),
        **popen: Any,
    ) -> None:
        """`name` is for the log. `receive` gets each message; true if it says that the child is ready. `on_exit` gets
        the reason of a death that was not asked for, and returns the error that it is for the owner's callers."""
        self.num_starts = 0
        self._name = name
        self._spawn = functools.partial(spawn, module, settings, *sockets, **popen)
        self._on_message = receive
        self._on_exit = on_exit
        self._log = log
        self._backoff = backoff
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._lost = asyncio.Event()  # the control connection is closed
        self._ready: asyncio.Future[bool] | None = None  # settled once: by the first child, or by a stop
        self._is_ready = False  # the child that runs now
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Of the latest child."""
        return None if self._process is None else self._process.pid

    @property
    def num_unsent(self) -> int:
        """Bytes of messages that the child has not read, beyond what its socket holds."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    async def start(self) -> None:
        """Start the child and keep it running. Returns at once."""
        self._ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._supervise(await self._start_child()))

    async def wait_ready(self) -> bool:
        """Until the first child is ready. False if it was stopped before; raises what kept it from starting."""
        assert self._ready is not None, "start it first"
        return await asyncio.shield(self._ready)

    async def wait(self) -> None:
        """Until the child has ended and is not started again. Raises what kept the first one from starting."""
        if self._task is None or self._ready is None:
            return
        await asyncio.shield(self._task)
        if self._ready.done() and (error := self._ready.exception()) is not None:
            raise error

    def send(self, body: bytes) -> None:
        """To the child, if there is one. Never waits."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(body))

    # -- the end

    def request_stop(self) -> None:
        """Ask the child to end, and start no other. Our side of the control connection closes; that is the request."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(False)
        self._close_our_side()

    def terminate(self) -> None:
        """SIGTERM, for a child that takes its time after `request_stop`."""
        if self._process is not None:
            self._process.terminate()  # harmless once it has ended

    async def stop(self, wait_s: float = STOP_S) -> None:
        """Ask, then insist. A child that is not ready yet reads no requests, and is killed at once."""
        self.request_stop()
        if self._task is None:
            return
        if self._is_ready:
            await asyncio.wait([self._task], timeout=wait_s)
        if not self._task.done():
            self._kill()
        await asyncio.wait([self._task])

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        if self._transport is not None:
            self._transport.abort()  # a process of the child's may hold the other end open

    def _close_our_side(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()

    # -- the life of the child

    async def _supervise(self, failure: str | None) -> None:
        """`failure`: why the first one could not be started."""
        while True:
            reason = failure or await self._wait_exit()
            if self._stopping.is_set():
                return
            error = self._tell_owner(reason)
            assert self._ready is not None
            if not self._ready.done():
                self._ready.set_exception(error)
                self._ready.exception()  # it may be that nothing waits for it
                return
            pause_s = self._backoff.next_s()
            self._log.error("%s died (%s); starting it again in %.1f s", self._name, reason, pause_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
            if self._stopping.is_set():
                return
            failure = await self._start_child()

    async def _start_child(self) -> str | None:
        """Returns why it could not be started, if so."""
        self.num_starts += 1
        self._backoff.started()
        self._is_ready = False
        try:
            process, control = self._spawn()
        except Exception as error:  # no descriptors, no memory, no processes left: it may be otherwise the next time
            return _could_not_start(error)
        self._lost = lost = asyncio.Event()
        try:
            transport, _ = await asyncio.get_running_loop().create_connection(
                lambda: FrameProtocol(self._receive, lost.set), sock=control
            )
        except Exception as error:
            abandon(process, control)
            return _could_not_start(error)
        self._process, self._transport = process, transport
        if self._stopping.is_set():  # meanwhile
            self._close_our_side()
        return None

    async def _wait_exit(self) -> str:
        await self._lost.wait()
        assert self._process is not None
        return await wait_exit(self._process)

    def _tell_owner(self, reason: str) -> Exception:
        """The owner's error. One of its own making is logged: the child is started again all the same."""
        try:
            return self._on_exit(reason)
        except Exception as error:
            self._log.exception("what follows from the death of %s failed", self._name)
            return error

    def _receive(self, body: bytes) -> None:
        if self._on_message(body):
            self._is_ready = True
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(True)


async def wait_exit(process: subprocess.Popen[bytes]) -> str:
    """As `exit_reason`, but without a thread: there may be none to have when a child dies."""
    if await _has_ended(process, EXIT_S):
        return code_reason(process.returncode)
    kill_late(process, EXIT_S)
    await _has_ended(process, EXIT_S)  # False: it hangs in the kernel, for example on a bad disk
    return killed_reason(EXIT_S)


async def _has_ended(process: subprocess.Popen[bytes], wait_s: float) -> bool:
    """Within that time."""
    until_s = time.monotonic() + wait_s
    while process.poll() is None:
        if time.monotonic() > until_s:
            return False
        await asyncio.sleep(_POLL_S)
    return True


def _could_not_start(error: Exception) -> str:
    return f"it could not be started: {describe(error)}"
