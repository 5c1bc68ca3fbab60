"""What makes two requests the same, and which answers may stand for another.

Does: name a request by everything that can change its answer. Does not: guess which unknown fields matter: all do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

# They say who asks, or when, never what.
NO_EFFECT = frozenset({
    "metadata", "priority", "prompt_cache_key", "request_id", "safety_identifier", "service_tier", "store", "use_cache",
    "user",
})  # fmt: skip

_encode = msgspec.json.Encoder(order="sorted").encode


def response_name(*, tenant: str, path: str, model: tuple[Any, ...], body: Mapping[str, Any]) -> bytes:
    """A digest over tenant, endpoint, the model's identity (adapter included) and every field that has an effect."""
    fields = {name: value for name, value in body.items() if name not in NO_EFFECT and name != "model"}
    return hashlib.sha256(_encode([tenant, path, model, fields])).digest()


def may_reuse(body: Mapping[str, Any]) -> bool:
    """Asked again, the request must give the same answer: greedy, or with a seed."""
    if isinstance(body.get("seed"), int):
        return True
    if body.get("do_sample") is False:
        return True
    temperature = body.get("temperature")
    return isinstance(temperature, int | float) and not isinstance(temperature, bool) and temperature == 0
