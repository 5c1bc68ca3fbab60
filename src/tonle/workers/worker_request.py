"""`WorkerRequest`: an HTTP request without its connection, as an endpoint of a pool gets it. Does not: parse."""

from __future__ import annotations

import msgspec


class WorkerRequest(msgspec.Struct, frozen=True):
    path: str
    body: bytes
    headers: dict[str, str]  # names in lower case

    def header(self, name: str) -> str:
        """Empty if absent."""
        return self.headers.get(name, "")

    @property
    def is_strict(self) -> bool:
        """Fields without effect are an error. A server's own setting comes as this header, too."""
        return self.header("x-tonle-strict").lower() in ("1", "true")
