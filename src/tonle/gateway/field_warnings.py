"""What a caller is told about the fields of a request: a header, and `warnings` in the answer, beside a backend's own.

Does: write the gateway's warnings into answers that backends made, whole or streamed. Does not: find them
(`parsed_request.py`), or change an answer where there are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tonle.protocol.openai import FieldWarning

HEADER = "x-tonle-warnings"
MAX_CHARS = 256  # of the header
_EVENT = b"data: {"


def header(ours: Sequence[FieldWarning], theirs: str) -> str:
    """`2; user, top_a`: how many, and which. `theirs` is a backend's header of this kind, or empty."""
    _, _, listed = theirs.partition("; ")
    names = [warning.param.encode("unicode_escape").decode() for warning in ours]
    names += [name for name in listed.split(", ") if name and name not in names]
    return f"{len(names)}; {', '.join(names)}"[:MAX_CHARS].rstrip()


def in_whole(body: bytes, ours: Sequence[FieldWarning]) -> bytes:
    """A whole answer with our warnings; one that is not a JSON object stays as it is."""
    try:
        reply = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body
    return msgspec.json.encode(_joined(reply, ours)) if isinstance(reply, dict) else body


def in_stream(piece: bytes, ours: Sequence[FieldWarning]) -> bytes:
    """The first piece of a stream with our warnings in its first event."""
    start = piece.find(_EVENT)
    end = piece.find(b"\n", start)
    if start < 0 or end < 0:
        return piece
    begin = start + len(_EVENT) - 1
    return piece[:begin] + in_whole(piece[begin:end], ours) + piece[end:]


def _joined(reply: dict[str, Any], ours: Sequence[FieldWarning]) -> dict[str, Any]:
    """Where both warn about a field, the backend's warning is kept: it knows what it did."""
    theirs = reply.get("warnings")
    theirs = theirs if isinstance(theirs, list) else []
    told = {entry.get("param") for entry in theirs if isinstance(entry, dict)}
    return {**reply, "warnings": [*(warning for warning in ours if warning.param not in told), *theirs]}
