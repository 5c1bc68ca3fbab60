"""Server-sent events, the way OpenAI frames them: `data: <json>` and an empty line, `[DONE]` at the end.

Does: frame bytes. Does not: write to a connection.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.json import Encoder

CONTENT_TYPE = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"

_encode = Encoder().encode


def event(body: Struct) -> bytes:
    # JSON has no raw line breaks, so one `data:` line always holds it.
    return b"data: %b\n\n" % _encode(body)
