"""A server that takes posts of a webhook, keeps them, and answers as it is told."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


class Receiver:
    """A plain HTTP server that keeps what it is posted, and answers as it is told."""

    def __init__(self) -> None:
        self.status = 204
        self.posts: list[tuple[str, dict[str, str], bytes]] = []  # target, headers, body
        self.url = ""

    @property
    def told(self) -> list[str]:
        return [f"{each['subject']} {each['state']}" for each in self.data]

    @property
    def data(self) -> list[dict[str, Any]]:
        return [json.loads(body)["data"] for _, _, body in self.posts]

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().strip().split("\r\n")
                headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
                body = await reader.readexactly(int(headers["content-length"]))
                self.posts.append((first.split()[1], headers, body))
                writer.write(f"HTTP/1.1 {self.status} X\r\nContent-Length: 0\r\n\r\n".encode())
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@asynccontextmanager
async def receiver(tls: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    place = Receiver()
    server = await asyncio.start_server(place.answer, "127.0.0.1", 0, ssl=tls)
    scheme, port = "http" if tls is None else "https", server.sockets[0].getsockname()[1]
    place.url = f"{scheme}://127.0.0.1:{port}/hooks/v1?token=t%20t"
    try:
        yield place
    finally:
        server.close()
