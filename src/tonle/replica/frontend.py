"""One of several front ends: a process that answers HTTP for an engine it shares with others.

Run as `python -m tonle.replica.frontend LEASH_FD LISTENER_FD`; the first frame on the leash says what to serve. Does:
text, HTTP, its line to the engine. Does not: start or watch anything. When the keeper lets go of the leash, or dies, it
drains.
"""

from __future__ import annotations

import asyncio
import socket
import sys

import msgspec

from tonle.edge.listening import run
from tonle.engine.child import read_order
from tonle.engine.front import Front
from tonle.engine.link import EngineLink
from tonle.engine.text import load_text
from tonle.models.source import ModelSource
from tonle.replica.options import ReplicaOptions
from tonle.replica.serve import serve
from tonle.telemetry import logs
from tonle.telemetry.goodbye import say_stopped

READY = b"ready\n"  # on the leash, when connections are accepted


class FrontendOrder(msgspec.Struct, kw_only=True):
    """The same for every front end of a server."""

    source: ModelSource
    name: str  # of the model in the API
    created: int  # unix seconds, of the model in the API
    engine_address: str  # Unix socket
    hold_clusters: str
    options: ReplicaOptions
    drain_s: float
    log_level: str
    log_json: bool


class _Leash(asyncio.Protocol):
    def __init__(self, let_go: asyncio.Event) -> None:
        self._let_go = let_go

    def eof_received(self) -> bool:
        self._let_go.set()
        return True  # our end stays open: it tells the keeper that we live

    def connection_lost(self, exc: Exception | None) -> None:
        self._let_go.set()


async def _serve(order: FrontendOrder, leash: socket.socket, listener: socket.socket) -> None:
    stop = asyncio.Event()
    keeper, _ = await asyncio.get_running_loop().create_connection(lambda: _Leash(stop), sock=leash)
    link = EngineLink(order.engine_address)
    front = Front(load_text(order.source), order.name, link.send, hold_clusters=order.hold_clusters)
    front.created = order.created
    link.start(front)
    num_cut = await serve(
        front,
        listener=listener,
        options=order.options,
        drain_s=order.drain_s,
        on_ready=lambda _: keeper.write(READY),
        stop=stop,
    )
    link.stop()
    if num_cut:  # else the keeper says all there is to say
        say_stopped(num_cut)


def main(leash: socket.socket, listener: socket.socket) -> None:
    order = read_order(leash, FrontendOrder)
    logs.configure(order.log_level, json=order.log_json)
    listener.setblocking(False)
    run(_serve(order, leash, listener))


if __name__ == "__main__":
    main(*(socket.socket(fileno=int(number)) for number in sys.argv[1:3]))
