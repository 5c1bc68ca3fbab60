"""Run a replica until it is told to stop.

Does: bind, serve, drain on the first signal, end at once on the second, say how it goes. Does not: start or stop the
engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import uvicorn

from tonle.errors import ConfigError
from tonle.protocol.address import url_of
from tonle.replica.app import ReplicaApp, build_app
from tonle.replica.options import ReplicaOptions
from tonle.replica.served import Served
from tonle.telemetry import goodbye

log = logging.getLogger("tonle.replica")

BACKLOG = 2048  # connections the kernel holds before we accept them
KEEP_ALIVE_S = 75  # longer than load balancers keep idle connections, so that they and not we close them
ABORT_GRACE_S = 0.5  # after requests were cut off, for their last bytes to leave
POLL_S = 0.02  # while they leave

ResultT = TypeVar("ResultT")


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


def run(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """`asyncio.run`, on uvloop where there is one."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


def bind(host: str, port: int, *, share: bool = False) -> socket.socket:
    """Claim the address, before anything slow is begun. Port 0 takes a free one. Raises `ConfigError`.

    With `share`, more sockets of this user may be bound to it with `share`: the kernel deals out connections.
    """
    if not 0 <= port < 2**16:
        raise ConfigError(
            f"cannot listen on {host}, port {port}: ports go from 0 to 65535. Check --port.", param="port"
        )
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        raise ConfigError(f"cannot listen on {host}: there is no such address. Check --host.", param="host") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _bind_error(host, port, error) from None
    listener.setblocking(False)
    return listener


def _bind_error(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        why = "another program is using it. Stop that, or choose another port with --port"
    elif error.errno == errno.EACCES:
        why = "ports below 1024 need more rights. Choose another port with --port"
    elif error.errno == errno.EADDRNOTAVAIL:
        why = "this machine has no such address. Choose another with --host"
    else:
        why = f"{error.strerror}. Check --host and --port"
    return ConfigError(f"cannot listen on {host}, port {port}: {why}.", param="port")


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
