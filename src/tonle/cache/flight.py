"""`Flight`: an answer being computed, which identical requests wait for instead of computing it again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedResponse:
    """A whole answer as its bytes. A stream is kept as the events it was."""

    body: bytes
    content_type: str
    stream: bool
    request_id: str  # of the request it was computed for
    usage_tokens: int = 0


class Flight:
    """Its leader lands it, with the answer or with None if there is nothing to share."""

    def __init__(self, on_landed: Callable[[CachedResponse | None], None]) -> None:
        self._on_landed = on_landed
        self._landed: asyncio.Future[CachedResponse | None] = asyncio.get_running_loop().create_future()

    def land(self, response: CachedResponse | None) -> None:
        """Wakes everybody who waits. Idempotent: the first call counts."""
        if not self._landed.done():
            self._landed.set_result(response)
            self._on_landed(response)

    async def wait(self) -> CachedResponse | None:
        """None: the leader had no answer to share; try on your own."""
        return await asyncio.shield(self._landed)
