"""`PassedMedia`: sound or pictures on their way to the caller, which are counted and never read.

Does: count, hash, keep a copy of a bounded size where one is wanted for the record. Does not: write to anybody.
"""

from __future__ import annotations

import hashlib
from typing import Any

from tonle.protocol.answers import Answer

MAX_KEPT_BYTES = 25 * 1024**2  # of an answer, for the record; of a longer one its hash is all there is
_BINARY = ("audio/", "image/", "video/", "application/octet-stream")


def is_binary(content_type: str | None) -> bool:
    """Neither JSON nor events nor text: passed on as it comes."""
    return (content_type or "").strip().lower().startswith(_BINARY)


class PassedMedia:
    __slots__ = ("_digest", "_kept", "complete", "content_type", "size")

    def __init__(self, content_type: str, *, hashes: bool, keeps: bool) -> None:
        """`hashes`: its hash is wanted. `keeps`: so is a copy."""
        self.content_type = content_type
        self.size = 0  # bytes so far
        self.complete = False
        self._digest = hashlib.sha256() if hashes or keeps else None
        self._kept: bytearray | None = bytearray() if keeps else None

    def add(self, piece: bytes) -> None:
        self.size += len(piece)
        if self._digest is not None:
            self._digest.update(piece)
        if self._kept is not None:
            if self.size <= MAX_KEPT_BYTES:
                self._kept += piece
            else:
                self._kept = None

    @property
    def copy(self) -> bytes | None:
        """All of it, if it was kept and is whole."""
        return bytes(self._kept) if self._kept is not None and self.complete else None

    def answer(self) -> Answer:
        """As a record has it."""
        about: dict[str, Any] = {"content_type": self.content_type, "size": self.size}
        if self._digest is not None:
            about["sha256"] = self._digest.hexdigest()
        return Answer(raw=about, complete=self.complete)
