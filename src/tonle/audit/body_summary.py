"""`BodySummary`: what is kept of a request body that is not kept whole.

A refused request must not cost the disk what its caller likes to send. A caller without a valid key leaves the first 2 kB
of a body, its length and its hash; one with a key leaves a refused body of up to 64 KiB whole.

Does: summarize bytes, and show a summary in a record. Does not: read a body or decide who is refused.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

FIRST_BYTES = 2048  # of a body that is not kept whole
MAX_REFUSED_BYTES = 64 * 1024  # of the body of a refused request whose caller is known, kept whole
# Where masking is on, the end of a text that was cut is left out, because what is cut in two is not recognized.
# It is longer than the longest match of a built-in pattern.
UNSAFE_CHARS = 640


class BodySummary(msgspec.Struct, frozen=True, array_like=True):
    declared: int | None  # Content-Length, in bytes; None: there was none
    num_received: int  # bytes
    first: bytes  # at most FIRST_BYTES
    sha256: str  # of what was received, hex

    @property
    def is_cut(self) -> bool:
        return self.num_received > len(self.first)


def summary_of(body: bytes, declared: int | None = None) -> BodySummary:
    return BodySummary(declared, len(body), bytes(body[:FIRST_BYTES]), hashlib.sha256(body).hexdigest())


def shown(summary: BodySummary) -> dict[str, Any]:
    """As a record has it."""
    return {
        "declared_bytes": summary.declared,
        "received_bytes": summary.num_received,
        "sha256": summary.sha256,
        "first": summary.first.decode(errors="replace"),
    }


def is_text(raw: bytes, *, is_cut: bool = False) -> bool:
    """Whether patterns can find anything in it: UTF-8 without NULs, which other encodings of text are full of."""
    if b"\0" in raw:
        return False
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return is_cut and error.start >= len(raw) - 3  # the cut went through a letter
    return True
