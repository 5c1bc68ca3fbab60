"""An ASGI application over a scripted front, and a caller of ASGI applications: for what wraps other people's servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tonle.protocol.answers import Answer
from tonle.replica.dispatch import ReplicaTransport
from tonle.replica.replica import Replica, ReplicaOptions


class _QueueSink:
    """Puts ASGI messages into a queue."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def attach(self, press: Callable[[bool], None]) -> None:
        pass

    def know(self, answer: Answer) -> None:
        pass

    def head(self, status: int, headers: dict[str, str]) -> None:
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        self.messages.put_nowait({"type": "http.response.start", "status": status, "headers": raw})

    def data(self, piece: bytes) -> None:
        self.messages.put_nowait({"type": "http.response.body", "body": piece, "more_body": True})


def replica_app(front: Any) -> Any:
    """A server such as others write: it reads the body, streams, and stops when its caller hangs up."""
    transport = ReplicaTransport(Replica(front, ReplicaOptions()))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        sink = _QueueSink()

        async def work() -> None:
            try:
                await transport.send(scope["method"], scope["path"], body, headers, sink, first_s=60, silence_s=60)
            finally:
                sink.messages.put_nowait(None)

        async def forward() -> None:
            while (message := await sink.messages.get()) is not None:
                await send(message)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        task, forwarder = asyncio.create_task(work()), asyncio.create_task(forward())
        hangup = asyncio.create_task(receive())
        await asyncio.wait({forwarder, hangup}, return_when=asyncio.FIRST_COMPLETED)
        for each in (task, forwarder, hangup):
            each.cancel()
        await asyncio.gather(task, forwarder, hangup, return_exceptions=True)

    return app


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
