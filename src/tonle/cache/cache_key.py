"""Cache keys: which requests are identical, and which may be answered from the cache.

Does: hash everything that can change the response. Does not: guess which unknown fields matter: all of them count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

# Fields that do not change the response.
NO_EFFECT = frozenset({
    "metadata", "priority", "prompt_cache_key", "request_id", "safety_identifier", "service_tier", "store", "use_cache",
    "user",
})  # fmt: skip

_encode = msgspec.json.Encoder().encode
_encode_sorted = msgspec.json.Encoder(order="sorted").encode


def cache_key(*, tenant: str, path: str, model: tuple[Any, ...], body: Mapping[str, Any]) -> bytes:
    """SHA-256 of tenant, endpoint, the model's identity (adapter included) and every field that has an effect.

    The order of fields does not count, nor that inside messages. In other fields it does: an answer has its properties in
    the order of its schema, and a prompt has tools as they were given.
    """
    fields = [
        (name, body[name]) for name in sorted(body) if name not in NO_EFFECT and name not in ("model", "messages")
    ]
    messages = msgspec.Raw(_encode_sorted(body.get("messages")))
    return hashlib.sha256(_encode([tenant, path, model, messages, fields])).digest()


def may_reuse(body: Mapping[str, Any]) -> bool:
    """Whether the request would get the same response again: greedy, or with a seed."""
    if isinstance(body.get("seed"), int):
        return True
    if body.get("do_sample") is False:
        return True
    temperature = body.get("temperature")
    return isinstance(temperature, int | float) and not isinstance(temperature, bool) and temperature == 0
