"""`stream`: send a request and read the answer piece by piece, as an async iterator.

Does: wait for the head, hand out the body as it arrives, hold the server back while the reader is slower, hang up when the
reader leaves early. Does not: read what is in the body.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tonle.edge.buffered_reply import MAX_BYTES
from tonle.edge.client import TOO_LARGE, HttpClient, UpstreamError
from tonle.protocol.answers import Answer

MAX_UNREAD_BYTES = 1024**2  # above it, the server is asked to wait


class StreamedReply:
    """A `Sink` for one answer that is read while it arrives. Iterate over it once."""

    def __init__(self) -> None:
        self.status = 0  # 0 until the head is complete
        self.headers: dict[str, str] = {}
        self._begun = asyncio.Event()  # the head is complete, or there is no answer
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()  # None: no more come
        self._num_unread = 0  # bytes
        self._press: Callable[[bool], None] | None = None
        self._sending: asyncio.Task[None] | None = None

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "")

    async def begin(self, sending: asyncio.Task[None]) -> None:
        """Return when the head of the answer that `sending` brings is complete. Raises `UpstreamError` if none comes."""
        self._sending = sending
        sending.add_done_callback(self._end)
        await self._begun.wait()
        if self.status == 0:
            await sending

    def __aiter__(self) -> StreamedReply:
        return self

    async def __anext__(self) -> bytes:
        """The next piece of the body. Raises `UpstreamError` if it breaks off."""
        if (piece := await self._pieces.get()) is not None:
            self._num_unread -= len(piece)
            if self._press is not None and self._num_unread <= MAX_UNREAD_BYTES:
                self._press(False)
            return piece
        assert self._sending is not None, "read before it was sent"
        await self._sending
        raise StopAsyncIteration

    async def read(self) -> bytes:
        """The whole body. Raises `UpstreamError` if it is too large."""
        pieces, size = [], 0
        async for piece in self:
            pieces.append(piece)
            size += len(piece)
            if size > MAX_BYTES:
                raise UpstreamError(TOO_LARGE, f"more than {MAX_BYTES} bytes", began=True)
        return b"".join(pieces)

    def attach(self, press: Callable[[bool], None]) -> None:
        self._press = press

    def know(self, answer: Answer) -> None:
        """The body is what is wanted."""

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.status, self.headers = status, headers
        self._begun.set()

    def data(self, piece: bytes) -> None:
        self._pieces.put_nowait(piece)
        self._num_unread += len(piece)
        if self._press is not None and self._num_unread > MAX_UNREAD_BYTES:
            self._press(True)

    def _end(self, sending: asyncio.Task[None]) -> None:
        self._pieces.put_nowait(None)
        self._begun.set()


@asynccontextmanager
async def stream(
    client: HttpClient, request: bytes, *, first_s: float, silence_s: float
) -> AsyncIterator[StreamedReply]:
    """The answer to the bytes of a request, once its head is there. Leaving the context closes what has not ended."""
    reply = StreamedReply()
    sending = asyncio.create_task(client.send(request, reply, first_s=first_s, silence_s=silence_s))
    try:
        await reply.begin(sending)
        yield reply
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
