"""`UnreadBody`: what is known of a request body that is not kept, because the request was refused or has no use for one.

Does: count, hash, keep the beginning for the record. Does not: hold more than that, whatever is sent.
"""

from __future__ import annotations

import hashlib

FIRST_BYTES = 2048  # kept of it


class UnreadBody:
    """Stands in place of `Exchange.body`, which stays empty."""

    __slots__ = ("_digest", "declared", "first", "num_received")

    def __init__(self, declared: int | None) -> None:
        self.declared = declared  # Content-Length; None: the head gave none
        self.num_received = 0  # bytes, until the request was answered or the body had ended
        self.first = b""  # at most FIRST_BYTES
        self._digest = hashlib.sha256()

    def add(self, piece: bytes | bytearray) -> None:
        if len(self.first) < FIRST_BYTES:
            self.first += piece[: FIRST_BYTES - len(self.first)]
        self.num_received += len(piece)
        self._digest.update(piece)

    def sha256(self) -> str:
        """Hex, of what was received."""
        return self._digest.hexdigest()
