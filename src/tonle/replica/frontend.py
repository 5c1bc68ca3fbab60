"""One of several front ends: a process that answers HTTP for an engine it shares with others.

Run as `python -m tonle.replica.frontend CONTROL_FD LISTENER_FD`; the first message on the control socket says what to
serve. Does: text, HTTP, its connection to the engine. Does not: start or watch anything. When the parent closes its side
of the control socket, or dies, it drains.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

import msgspec

from tonle.child.frames import frame
from tonle.child.heap import return_large_blocks
from tonle.child.spawn import inherited_sockets, read_settings
from tonle.config.serve import ServeConfig
from tonle.edge.listening import run
from tonle.engine.front import Front
from tonle.engine.link import EngineLink
from tonle.engine.text import load_text
from tonle.models.source import ModelSource
from tonle.replica.serve import replica_options, serve
from tonle.telemetry import logs
from tonle.telemetry.shutdown_messages import say_stopped

READY = b"ready"  # the message to the parent when connections are accepted


class FrontendSettings(msgspec.Struct, kw_only=True):
    """The first message to the child. The same for every front end of a server."""

    source: ModelSource
    name: str  # of the model in the API
    created: int  # unix seconds, of the model in the API
    engine_address: str  # Unix socket
    settings: ServeConfig
    metrics_dir: str  # in which all of them count
    started_s: float  # when the server began, `time.monotonic()`
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


async def _serve(own: FrontendSettings, control: socket.socket, listener: socket.socket) -> None:
    stop = asyncio.Event()
    parent, _ = await asyncio.get_running_loop().create_connection(lambda: _ControlConnection(stop), sock=control)
    link = EngineLink(own.engine_address)
    text = load_text(own.source, special_tokens_in_content=own.settings.special_tokens_in_content)
    front = Front(text, own.name, link.send, hold_clusters=own.settings.hold_clusters)
    front.created = own.created
    link.start(front)
    num_cut = await serve(
        front,
        own.settings,
        listener=listener,
        options=replace(replica_options(own.settings), metrics_dir=own.metrics_dir, started_s=own.started_s),
        on_ready=lambda: parent.write(frame(READY)),
        stop=stop,
    )
    link.stop()
    if num_cut:  # else the parent says all there is to say
        say_stopped(num_cut)


def main(control: socket.socket, listener: socket.socket) -> None:
    return_large_blocks()
    settings = read_settings(control, FrontendSettings)
    logs.configure(settings.log_level, json=settings.log_json)
    listener.setblocking(False)
    run(_serve(settings, control, listener))


if __name__ == "__main__":
    main(*inherited_sockets())
