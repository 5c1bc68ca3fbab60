"""`send`: one request over the shared HTTP client, with the moment each piece of the answer arrived.

Does: time stamp, keep or hand on the body, bound the whole exchange in time. Does not: read what is in the body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter

from tonle.edge.client import HttpClient, UpstreamError
from tonle.protocol.answers import Answer

OnData = Callable[[bytes, float], None]  # body bytes, and the moment they arrived (perf_counter)


class Received:
    """A `Sink` for one answer. The body of a 200 goes to `on_data` as it arrives, if given; otherwise it is kept."""

    __slots__ = ("_on_data", "_parts", "content_type", "status")

    def __init__(self, on_data: OnData | None = None) -> None:
        self.status = 0  # 0 until the head is complete
        self.content_type = ""
        self._on_data = on_data
        self._parts: list[bytes] = []

    @property
    def body(self) -> bytes:
        return b"".join(self._parts)

    def attach(self, press: Callable[[bool], None]) -> None:
        """It is never full."""

    def know(self, answer: Answer) -> None:
        """It reads the bytes."""

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        self.content_type = headers.get("content-type", "")

    def data(self, piece: bytes) -> None:
        if self._on_data is not None and self.status == 200:
            self._on_data(piece, perf_counter())
        else:
            self._parts.append(piece)


async def send(client: HttpClient, request: bytes, *, timeout_s: float, on_data: OnData | None = None) -> Received:
    """Send the bytes of a request. Raises `UpstreamError` unless a whole answer, of any status, came in time."""
    received = Received(on_data)
    try:
        async with asyncio.timeout(timeout_s):
            await client.send(request, received, first_s=timeout_s, silence_s=timeout_s)
    except TimeoutError:
        raise UpstreamError("timeout", f"no full answer in {timeout_s:g} s") from None
    return received
