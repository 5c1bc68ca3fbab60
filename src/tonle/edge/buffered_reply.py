"""`BufferedReply`: a sink that keeps a whole answer. `fetch`: send a request and return one.

Does: keep the body, or hand the body of a 200 on as it arrives; bound the size, and with `fetch` the whole exchange in time.
Does not: read what is in the body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tonle.edge.client import TIMEOUT, TOO_LARGE, HttpClient, UpstreamError
from tonle.protocol.answers import Answer

MAX_BYTES = 16 * 1024**2

OnData = Callable[[bytes], None]


class BufferedReply:
    """A `Sink` for one answer. The body of a 200 goes to `on_data` as it arrives, if given; otherwise it is kept."""

    def __init__(self, on_data: OnData | None = None, *, max_bytes: int = MAX_BYTES) -> None:
        self.status = 0  # 0 until the head is complete
        self.asked = False  # the request was sent, or is being sent
        self.headers: dict[str, str] = {}
        self._on_data = on_data
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []
        self._size = 0

    @property
    def body(self) -> bytes:
        return b"".join(self._pieces)

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "")

    def attach(self, press: Callable[[bool], None]) -> None:
        """It is never full."""
        self.asked = True

    def know(self, answer: Answer) -> None:
        """The body is what is wanted."""

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        self.headers = headers

    def data(self, piece: bytes) -> None:
        if self._on_data is not None and self.status == 200:
            self._on_data(piece)
            return
        self._size += len(piece)
        if self._size > self._max_bytes:
            raise UpstreamError(TOO_LARGE, f"more than {self._max_bytes} bytes", began=True)
        self._pieces.append(piece)


async def fetch(
    client: HttpClient, request: bytes, *, timeout_s: float, on_data: OnData | None = None, max_bytes: int = MAX_BYTES
) -> BufferedReply:
    """Send the bytes of a request. Raises `UpstreamError` unless a whole answer, of any status, came in time."""
    reply = BufferedReply(on_data, max_bytes=max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            await client.send(request, reply, first_s=timeout_s, silence_s=timeout_s)
    except TimeoutError:
        raise UpstreamError(TIMEOUT, f"no full answer in {timeout_s:g} s", began=reply.status != 0) from None
    return reply
