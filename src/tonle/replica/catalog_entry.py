"""`CatalogEntry`: what the docs page and /openapi.json say about one endpoint.

Does: hold. Does not: list (`api_catalog.py`, `translated_catalog.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from tonle.protocol import sse
from tonle.protocol.openai import ErrorBody


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    method: str
    path: str
    summary: str
    request: type[msgspec.Struct] | None = None
    reply: type[msgspec.Struct] | None = None  # None: see `media`
    media: str = "application/json"
    example: dict[str, Any] | None = None  # a body that works
    streams: bool = False  # the reply may come in pieces: as server-sent events, unless `stream_media` says otherwise
    chunk: type[msgspec.Struct] | None = None  # what is in an event; None = no type of ours
    stream_text: str = "With stream: true. Events `data: {...}`; the last one is `data: [DONE]`."
    stream_media: str = sse.MEDIA_TYPE
    error: type[msgspec.Struct] = ErrorBody
