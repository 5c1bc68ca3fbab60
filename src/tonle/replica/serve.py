"""Run a replica until it is told to stop.

Does: serve, drain on the first signal, end at once on the second, say how it goes. Does not: start or stop the
engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from tonle.edge.listening import BACKLOG, bind, url_of
from tonle.replica.app import ReplicaApp, build_app
from tonle.replica.options import ReplicaOptions
from tonle.replica.served import Served
from tonle.telemetry import goodbye

log = logging.getLogger("tonle.replica")

KEEP_ALIVE_S = 75  # longer than load balancers keep idle connections, so that they and not we close them
ABORT_GRACE_S = 0.5  # after requests were cut off, for their last bytes to leave
POLL_S = 0.02  # while they leave


async def serve(
    front: Served, *, host: str = "127.0.0.1", port: int = 8000, listener: socket.socket | None = None,
    options: ReplicaOptions | None = None, drain_s: float = 30.0, on_ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
) -> int:  # fmt: skip
    """Serve until SIGTERM or SIGINT, then let running requests finish for at most `drain_s` seconds.

    Returns how many requests were cut off after that, or by a second signal.

    `listener` is a socket from `bind`; without it, host and port are bound here (`ConfigError` if that fails).
    `on_ready` is called with the base URL when connections are accepted. Setting `stop` does what a signal does; in a
    thread other than the main one it is the only way.
    """
    listener = listener or bind(host, port)
    app = build_app(front, options)
    config = uvicorn.Config(
        app,
        loop="none",  # we are inside one
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = _Server(config, app, on_ready, drain_s)
    watch = asyncio.create_task(_stop_when(stop, server)) if stop is not None else None
    try:
        await server.serve(sockets=[listener])
    finally:
        if watch is not None:
            watch.cancel()
    return server.num_cut


async def _stop_when(stop: asyncio.Event, server: _Server) -> None:
    await stop.wait()
    if not server.should_exit:  # a signal may have come first
        server.begin_stop()


class _Server(uvicorn.Server):
    """uvicorn's, but the end of the drain is ours: it calls what we announced an error."""

    def __init__(
        self, config: uvicorn.Config, app: ReplicaApp, on_ready: Callable[[str], None] | None, drain_s: float
    ) -> None:
        super().__init__(config)
        self.num_cut = 0  # requests that were not allowed to finish
        self._app = app
        self._on_ready = on_ready
        self._drain_s = drain_s

    @property
    def num_running(self) -> int:
        return len(self.server_state.tasks)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._on_ready is not None and sockets:
            self._on_ready(url_of(*sockets[0].getsockname()[:2]))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ours: uvicorn raises the signal again when it is done, which would end the process before the engine is."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.getsignal(number) for number in signals}
        for number in signals:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler or signal.SIG_DFL)

    def _on_signal(self) -> None:
        """First one: close the door and drain. Second one: end what still runs."""
        if not self.should_exit:
            self.begin_stop(asked=True)
            return
        log.warning("stopping at once")
        self._cut()

    def begin_stop(self, *, asked: bool = False) -> None:
        """Close the door and drain. Where nobody `asked` and nothing runs, there is nothing to tell."""
        if asked or self.num_running:
            goodbye.say_stopping(self.num_running, self._drain_s)
        self._app.replica.draining = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        reminders = asyncio.create_task(goodbye.remind(lambda: self.num_running, self._drain_s))
        end = asyncio.get_running_loop().call_later(self._drain_s, self._cut)
        try:
            await super().shutdown(sockets)
        finally:
            reminders.cancel()
            end.cancel()
        while self.force_exit and self.server_state.connections:  # noqa: ASYNC110  (until `_abort` at the latest)
            await asyncio.sleep(POLL_S)

    def _cut(self) -> None:
        """Requests that still run are told that we end."""
        if self.force_exit:
            return
        self.num_cut = self.num_running
        self.force_exit = True  # uvicorn waits no longer
        for task in list(self.server_state.tasks):
            task.cancel()
        asyncio.get_running_loop().call_later(ABORT_GRACE_S, self._abort)

    def _abort(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()
