"""Run a server over a front on a loopback port, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any

import msgspec

from tonle.config.serve import ServeConfig
from tonle.edge.listening import bind, run, url_of
from tonle.replica.replica import ReplicaOptions
from tonle.replica.serve import serve


@contextlib.contextmanager
def serving(
    front: Any, options: ReplicaOptions | None = None, *, drain_s: float = 5.0, **settings: Any
) -> Iterator[str]:
    """Gives the base URL."""
    started: queue.Queue[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = queue.Queue()
    listener = bind("127.0.0.1", 0)

    async def main() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        config = ServeConfig(**{"port": 0, "drain_s": drain_s, **settings})
        ready = lambda: started.put((loop, stop))  # noqa: E731
        await serve(front, config, listener=listener, options=options, stop=stop, on_ready=ready)

    thread = threading.Thread(target=lambda: run(main()), daemon=True)
    thread.start()
    loop, stop = started.get(timeout=60)
    try:
        yield url_of(*listener.getsockname()[:2])
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=60)
        assert not thread.is_alive()


def events(stream: str) -> list[Any]:
    """The chunks of a server-sent stream; `[DONE]` stays a string."""
    pieces = [piece for piece in stream.split("\n\n") if piece]
    assert all(piece.startswith("data: ") for piece in pieces), stream
    datas = [piece.removeprefix("data: ") for piece in pieces]
    return [data if data == "[DONE]" else msgspec.json.decode(data) for data in datas]
