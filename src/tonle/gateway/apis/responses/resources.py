"""`Resources`: what all requests of the Responses API share.

Does: hold. Does not: build (`gateway.py` does).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tonle.edge.exchange import Exchange
from tonle.gateway.apis.responses.response_store import ResponseStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    store: ResponseStore | None  # None: nothing is stored
    max_bytes: int  # of a conversation that a request continues
    reserve: Callable[[Exchange, int], None]  # so many more bytes are held for a request; raises `CapacityError`
    context_length: Callable[[str | None], int | None]  # of a model, by the name that callers give; None: not known
