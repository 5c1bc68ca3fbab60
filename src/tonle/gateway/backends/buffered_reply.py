"""`BufferedReply`: a sink that keeps a whole answer, for requests the gateway itself makes to backends."""

from __future__ import annotations

from collections.abc import Callable

from tonle.edge.client import UpstreamError
from tonle.protocol.answers import Answer

MAX_BYTES = 16 * 1024**2


class BufferedReply:
    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._pieces: list[bytes] = []
        self._size = 0

    @property
    def body(self) -> bytes:
        return b"".join(self._pieces)

    def attach(self, press: Callable[[bool], None]) -> None:
        """It is never full."""

    def know(self, answer: Answer) -> None:
        """The body is what is wanted."""

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        self.headers = headers

    def data(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > MAX_BYTES:
            raise UpstreamError("unreadable answer", f"more than {MAX_BYTES} bytes")
        self._pieces.append(piece)
