"""One of several front ends: a process that answers HTTP for an engine it shares with others.

Run as `python -m tonle.replica.frontend CONTROL_FD LISTENER_FD`; the first message on the control socket says what to
serve. Does: text, HTTP, its connection to the engine. Does not: start or watch anything. When the parent closes its side
of the control socket, or dies, it drains.
"""

from __future__ import annotations

import asyncio
import socket

import msgspec

from tonle.child.frames import frame
from tonle.child.spawn import inherited_sockets, read_settings
from tonle.edge.listening import run
from tonle.engine.front import Front
from tonle.engine.link import EngineLink
from tonle.engine.text import load_text
from tonle.models.source import ModelSource
from tonle.replica.options import ReplicaOptions
from tonle.replica.serve import serve
from tonle.telemetry import logs
from tonle.telemetry.goodbye import say_stopped

READY = b"ready"  # the message to the parent when connections are accepted


class FrontendSettings(msgspec.Struct, kw_only=True):
    """The first message to the child. The same for every front end of a server."""

    source: ModelSource
    name: str  # of the model in the API
    created: int  # unix seconds, of the model in the API
    engine_address: str  # Unix socket
    options: ReplicaOptions
    drain_s: float
    log_level: str
    log_json: bool


class _ControlConnection(asyncio.Protocol):
    """Sets `stop` when the parent asks for an end or is gone."""

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = stop

    def eof_received(self) -> bool:
        self._stop.set()
        return True  # our side stays open: it tells the parent that we live

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop.set()


async def _serve(settings: FrontendSettings, control: socket.socket, listener: socket.socket) -> None:
    stop = asyncio.Event()
    parent, _ = await asyncio.get_running_loop().create_connection(lambda: _ControlConnection(stop), sock=control)
    link = EngineLink(settings.engine_address)
    front = Front(load_text(settings.source), settings.name, link.send)
    front.created = settings.created
    link.start(front)
    num_cut = await serve(
        front,
        listener=listener,
        options=settings.options,
        drain_s=settings.drain_s,
        on_ready=lambda _: parent.write(frame(READY)),
        stop=stop,
    )
    link.stop()
    if num_cut:  # else the parent says all there is to say
        say_stopped(num_cut)


def main(control: socket.socket, listener: socket.socket) -> None:
    settings = read_settings(control, FrontendSettings)
    logs.configure(settings.log_level, json=settings.log_json)
    listener.setblocking(False)
    run(_serve(settings, control, listener))


if __name__ == "__main__":
    main(*inherited_sockets())
