"""`Outlet`: where an answer goes. The caller's exchange is one; a service that wraps answers is another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Outlet(Protocol):
    def reply(
        self, body: bytes, *, status: int = 200, content_type: str = ..., headers: Iterable[tuple[str, str]] = ()
    ) -> None: ...
    def start(self, *, status: int = 200, content_type: str, headers: Iterable[tuple[str, str]] = ()) -> None: ...
    def write(self, piece: bytes) -> None: ...
    def end(self) -> None: ...
