"""How a request reaches a backend: over a socket, or by a call in this process. One method, two ways.

Does: send, and hand the answer to a sink. Does not: retry, count or choose.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from tonle.edge.client import HttpClient, Sink

SALT_HEADER = "x-tonle-salt"
SALT_SCOPE = "tonle.salt"  # no caller of an application can set this: it is not part of a request


class Transport(Protocol):
    async def send(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: dict[str, str],
        sink: Sink,
        *,
        first_s: float,
        silence_s: float,
    ) -> None:
        """Returns when the whole answer was handed on; raises `UpstreamError`."""
        ...

    def close(self) -> None: ...


class HttpTransport:
    def __init__(self, client: HttpClient) -> None:
        self._client = client

    async def send(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: dict[str, str],
        sink: Sink,
        *,
        first_s: float,
        silence_s: float,
    ) -> None:
        request = self._client.request(method, path, body, headers)
        await self._client.send(request, sink, first_s=first_s, silence_s=silence_s)

    def close(self) -> None:
        self._client.close()


class InlineTransport:
    """An ASGI application in this process: no socket, no copy."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def send(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: dict[str, str],
        sink: Sink,
        *,
        first_s: float,
        silence_s: float,
    ) -> None:
        room, hangup = asyncio.Event(), asyncio.Event()
        room.set()
        sink.attach(lambda full: room.clear() if full else room.set())
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if unread:
                return unread.pop()
            await hangup.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if hangup.is_set():
                return
            if message["type"] == "http.response.start":
                names = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
                sink.head(message["status"], names)
            elif message.get("body"):
                sink.data(message["body"])
                await room.wait()

        path, _, query = path.partition("?")
        scope = {
            "type": "http", "method": method, "path": path, "query_string": query.encode(), "root_path": "",
            "scheme": "http", "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            SALT_SCOPE: headers.get(SALT_HEADER, "").encode(),
        }  # fmt: skip
        task = asyncio.create_task(self._app(scope, receive, send))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            # To the application its caller has hung up: it frees what the request holds, and ends on its own.
            hangup.set()
            room.set()
            await asyncio.wait({task})
            raise

    def close(self) -> None:
        """Nothing is held."""
