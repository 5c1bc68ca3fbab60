"""Run a replica over a front on a loopback port, in a thread of its own; and call its application without a socket."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tonle.edge.listening import run
from tonle.replica.options import ReplicaOptions
from tonle.replica.serve import serve
from tonle.replica.served import Served


@contextlib.contextmanager
def serving(front: Served, options: ReplicaOptions | None = None, *, drain_s: float = 5.0) -> Iterator[str]:
    """Gives the base URL."""
    started: queue.Queue[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = queue.Queue()

    async def main() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        await serve(
            front, port=0, options=options, drain_s=drain_s, stop=stop,
            on_ready=lambda url: started.put((url, loop, stop)),
        )  # fmt: skip

    thread = threading.Thread(target=lambda: run(main()), daemon=True)
    thread.start()
    url, loop, stop = started.get(timeout=60)
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=60)
        assert not thread.is_alive()


@dataclass
class Call:
    """One request to an ASGI application, with both ends of the connection in the test's hands."""

    path: str
    body: Any = None
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    sent: list[dict[str, Any]] = field(default_factory=list)
    hangup: asyncio.Event = field(default_factory=asyncio.Event)  # set it to hang up

    async def receive(self) -> dict[str, Any]:
        if self.body is not None:
            body, self.body = self.body, None
            return {"type": "http.request", "body": body if isinstance(body, bytes) else msgspec.json.encode(body)}
        await self.hangup.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    async def run(self, app: Any) -> None:
        headers = [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]
        scope = {"type": "http", "method": self.method, "path": self.path, "headers": headers, "root_path": ""}
        await app(scope, self.receive, self.send)

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def reply(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])


def events(stream: str) -> list[Any]:
    """The chunks of a server-sent stream; `[DONE]` stays a string."""
    pieces = [piece for piece in stream.split("\n\n") if piece]
    assert all(piece.startswith("data: ") for piece in pieces), stream
    datas = [piece.removeprefix("data: ") for piece in pieces]
    return [data if data == "[DONE]" else msgspec.json.decode(data) for data in datas]
