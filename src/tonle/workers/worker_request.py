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
