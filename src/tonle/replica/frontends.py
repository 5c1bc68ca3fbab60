"""`Frontends`: the processes that answer HTTP on one port for one engine; started, watched, started again, stopped.

Does: give each a listening socket that outlives it, and a leash that tells of its death. Does not: answer anything.
Runs: in the keeper's process, on its event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from tonle.edge.listening import bind
from tonle.engine.child import epitaph, order_frame, spawn
from tonle.errors import ConfigError, InternalError
from tonle.replica.frontend import READY, FrontendOrder

log = logging.getLogger("tonle.replica")

METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client reads it when it is imported
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 30.0
_STEADY_S = 60.0  # one that lived this long is started again without delay


def bind_all(host: str, port: int, count: int) -> list[socket.socket]:
    """As many listening sockets on one port. Raises `ConfigError`."""
    if count == 1:
        return [bind(host, port)]
    if sys.platform != "linux":
        raise ConfigError(
            "several front ends on one port need Linux, which deals connections out between them; leave --frontends "
            "at 1, or run several servers behind `tonle gateway`",
            param="frontends",
        )
    if port:
        bind(host, port).close()  # alone: two servers that both share would take turns instead of being told
    first = bind(host, port, share=True)
    return [first, *(bind(host, first.getsockname()[1], share=True) for _ in range(count - 1))]


@contextmanager
def shared_folder() -> Iterator[Path]:
    """For the engine's address and the front ends' metrics; nobody else may enter it."""
    with tempfile.TemporaryDirectory(prefix="tonle-") as folder:  # made with mode 0700
        yield Path(folder)


def engine_entrance(folder: Path) -> tuple[socket.socket, str]:
    """Where front ends reach the engine, and its address. The socket stays with the keeper."""
    entrance, address = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), str(folder / "engine")
    entrance.bind(address)
    entrance.listen(128)
    return entrance, address


class Frontends:
    """Owns the processes. `start`, then `wait`; `stop` from a signal handler."""

    def __init__(self, order: FrontendOrder, listeners: list[socket.socket]) -> None:
        self._order = order_frame(order)
        self._metrics_dir = order.metrics_dir
        self._listeners = listeners
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # by place
        self._leashes: dict[int, _Leash] = {}
        self._ready = [asyncio.Event() for _ in listeners]
        self._stopping = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    async def start(self) -> None:
        """Start them all and keep them running. Returns at once."""
        self._keepers = [asyncio.create_task(self._keep(place)) for place in range(len(self._listeners))]

    async def wait_ready(self) -> None:
        """Until every one of them has accepted connections once."""
        for ready in self._ready:
            await ready.wait()

    async def wait(self) -> None:
        """Until all have ended after `stop`. Raises what kept one from starting."""
        try:
            await asyncio.gather(*self._keepers)
        finally:
            if not self._stopping.is_set():
                self.stop()
            await asyncio.gather(*self._keepers, return_exceptions=True)

    def stop(self) -> None:
        """First call: close the door and drain. Second call: end what still runs."""
        if self._stopping.is_set():
            for process in self._processes.values():
                process.send_signal(signal.SIGTERM)  # harmless once it has ended
            return
        self._stopping.set()
        for listener in self._listeners:
            listener.close()
        for leash in self._leashes.values():
            leash.let_go()

    async def _keep(self, place: int) -> None:
        """Whenever the process is lost: wait a little longer each time, start it again."""
        backoff_s = _FIRST_BACKOFF_S
        while not self._stopping.is_set():
            began = time.monotonic()
            process, lost = await self._spawn(place)
            await lost.wait()
            how = await epitaph(process)
            if self._stopping.is_set():
                return
            if not self._ready[place].is_set():
                raise InternalError(f"a front end could not start ({how}); the log above says why")
            if time.monotonic() - began > _STEADY_S:
                backoff_s = _FIRST_BACKOFF_S
            log.error("front end %d died (%s); starting it again in %.1f s", place + 1, how, backoff_s)
            await _sleep_unless(self._stopping, backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _spawn(self, place: int) -> tuple[subprocess.Popen[bytes], asyncio.Event]:
        ours, theirs = socket.socketpair()
        environ = dict(os.environ) | {METRICS_VARIABLE: self._metrics_dir}
        with theirs:
            # A process group of its own: Ctrl-C in a terminal comes to the keeper alone, which decides.
            process = spawn("tonle.replica.frontend", theirs, self._listeners[place], env=environ, process_group=0)
        self._processes[place] = process
        leash = self._leashes[place] = _Leash(self._order, self._ready[place])
        await asyncio.get_running_loop().create_connection(lambda: leash, sock=ours)
        if self._stopping.is_set():
            leash.let_go()
        return process, leash.lost


class _Leash(asyncio.Protocol):
    """The keeper's end of a front end's socket."""

    def __init__(self, order: bytes, ready: asyncio.Event) -> None:
        self.lost = asyncio.Event()
        self._order = order
        self._ready = ready
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's are none by inheritance
        self._transport.write(self._order)

    def let_go(self) -> None:
        """Ask it to drain and end."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()

    def data_received(self, data: bytes) -> None:
        if READY in data:
            self._ready.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


async def _sleep_unless(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return
