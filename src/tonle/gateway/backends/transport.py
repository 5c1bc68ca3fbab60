"""How a request reaches a backend: over a socket, or (`replica/dispatch.py`) by a call in this process.

Does: send, and hand the answer to a sink. Does not: retry, count or choose.
"""

from __future__ import annotations

from typing import Protocol

from tonle.edge.client import HttpClient, Sink

SALT_HEADER = "x-tonle-salt"
SHOW_PATHS_HEADER = "x-tonle-show-paths"  # to an engine of this process only: the caller may see folders of adapters
TRUST_SALT_HEADER = "x-tonle-trust-salt"  # of a replica's list of models, if it heeds the salt of a request


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
