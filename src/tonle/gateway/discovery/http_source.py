"""`HttpSource`: backends that a server lists, in the form of the file that `FileSource` reads: `tonle ray`, or one of yours.

Does: ask every second, bounded in time and size. Does not: take half of a list, or follow redirects.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

import msgspec

from tonle.config.discovery import HttpDiscovery, backend_of
from tonle.config.routing import BackendConfig
from tonle.edge.buffered_reply import BufferedReply
from tonle.edge.client import Address, HttpClient, UpstreamError
from tonle.gateway.discovery.file_source import MAX_BYTES, read_rows
from tonle.gateway.discovery.source import SourceLost

TIMEOUT_S = 5.0


class HttpSource:
    def __init__(self, wanted: HttpDiscovery) -> None:
        """Raises `ConfigError`."""
        self._wanted = wanted
        self._client = HttpClient(replace(Address.parse(wanted.url), prefix=""))
        parts = urlsplit(wanted.url)
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self.name = wanted.url

    async def watch(self) -> AsyncIterator[Sequence[BackendConfig]]:
        before: bytes | None = None
        while True:
            text = await self._read()
            if text != before:
                yield await asyncio.to_thread(self._rows, text)
                before = text
            await asyncio.sleep(self._wanted.interval_s)

    async def _read(self) -> bytes:
        reply = BufferedReply(max_bytes=MAX_BYTES)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                request = self._client.request("GET", self._target, b"", {})
                await self._client.send(request, reply, first_s=TIMEOUT_S, silence_s=TIMEOUT_S)
        except (UpstreamError, TimeoutError) as error:
            raise SourceLost(str(error) or f"no answer in {TIMEOUT_S:g} s") from None
        if reply.status != 200:
            raise SourceLost(f"it answers {reply.status}")
        return reply.body

    def _rows(self, text: bytes) -> tuple[BackendConfig, ...]:
        common = self._wanted.backend
        rows = read_rows(text)
        if any(row.api_key_env is not None for row in rows):  # else a list could have any variable sent to any address
            raise SourceLost(
                "a list over HTTP may not name a variable (api_key_env); set it in `backend` of this source"
            )
        return tuple(backend_of({**msgspec.to_builtins(row), **common}) for row in rows) if common else rows
