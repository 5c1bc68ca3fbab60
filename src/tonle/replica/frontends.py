"""`Frontends`: the processes that answer HTTP on one port for one engine; started, watched, started again, stopped.

Does: give each a listening socket that outlives it, and a supervisor. Does not: answer anything.
Runs: in the parent process, on its event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tonle.child.supervisor import Backoff, Supervisor
from tonle.edge.listening import bind
from tonle.errors import ConfigError, InternalError
from tonle.replica.frontend import READY, FrontendSettings

log = logging.getLogger("tonle.replica")

METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client reads it when it is imported
_FIRST_BACKOFF_S = 0.1


def bind_all(host: str, port: int, count: int) -> list[socket.socket]:
    """As many listening sockets on one port. Raises `ConfigError`."""
    if count == 1:
        return [bind(host, port)]
    if sys.platform != "linux":
        raise ConfigError(
            "several front ends on one port need Linux, which distributes connections between them; leave --frontends "
            "at 1, or run several servers behind `tonle gateway`",
            param="frontends",
        )
    if port:
        bind(host, port).close()  # alone: two servers that both share would take turns instead of being told
    first = bind(host, port, share=True)
    return [first, *(bind(host, first.getsockname()[1], share=True) for _ in range(count - 1))]


@contextmanager
def shared_folder() -> Iterator[Path]:
    """For the engine's address and the front ends' metrics; no other user can read it."""
    with tempfile.TemporaryDirectory(prefix="tonle-") as folder:  # made with mode 0700
        yield Path(folder)


def engine_listener(folder: Path) -> tuple[socket.socket, str]:
    """Where front ends reach the engine, and its address. The socket stays with the parent."""
    listener, address = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), str(folder / "engine")
    listener.bind(address)
    listener.listen(128)
    return listener, address


class Frontends:
    """Owns the processes. `start`, then `wait`; `stop` from a signal handler."""

    def __init__(self, settings: FrontendSettings, listeners: list[socket.socket]) -> None:
        self._listeners = listeners
        self._stopping = False
        self._supervisors = [
            Supervisor(
                f"front end {number}",
                "tonle.replica.frontend",
                settings,
                sockets=[listener],
                receive=lambda body: body == READY,
                on_exit=lambda reason: InternalError(f"a front end could not start ({reason}); the log above says why"),
                log=log,
                backoff=Backoff(_FIRST_BACKOFF_S),
                env=_environment(settings),
                process_group=0,  # of its own: Ctrl-C in a terminal comes to the parent alone, which decides
            )
            for number, listener in enumerate(listeners, 1)
        ]

    @property
    def stopping(self) -> bool:
        return self._stopping

    async def start(self) -> None:
        """Start them all and keep them running. Returns at once."""
        for supervisor in self._supervisors:
            await supervisor.start()

    async def wait_ready(self) -> bool:
        """Until each of them has accepted connections once. False if they were stopped before; raises as `wait`."""
        return all(await asyncio.gather(*(supervisor.wait_ready() for supervisor in self._supervisors)))

    async def wait(self) -> None:
        """Until all have ended after `stop`. Raises what kept one from starting."""
        try:
            await asyncio.gather(*(supervisor.wait() for supervisor in self._supervisors))
        finally:
            if not self._stopping:
                self.stop()
            await asyncio.gather(*(supervisor.wait() for supervisor in self._supervisors), return_exceptions=True)

    def stop(self) -> None:
        """First call: accept no more connections and drain. Second call: end what still runs."""
        if self._stopping:
            for supervisor in self._supervisors:
                supervisor.terminate()
            return
        self._stopping = True
        for listener in self._listeners:
            listener.close()
        for supervisor in self._supervisors:
            supervisor.request_stop()


def _environment(settings: FrontendSettings) -> dict[str, str]:
    return dict(os.environ) | {METRICS_VARIABLE: settings.metrics_dir}
