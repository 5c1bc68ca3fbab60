"""What a backend is sent: the caller's own bytes where nothing must change, else as little changed as possible.

Does: rename the model, ask for usage, add the owner's salt, drop fields of ours. Does not: send.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tonle.gateway.backends.backend import Backend
from tonle.gateway.backends.transport import SALT_HEADER
from tonle.gateway.call import OWN_FIELDS, Call

PASSED_HEADERS = ("traceparent", "tracestate", "x-tonle-strict")


def body_for(call: Call, backend: Backend, salt: str, extra: dict[str, Any] | None = None) -> bytes:
    changes: dict[str, Any] = dict(extra or {})
    if call.model != call.asked_model:
        changes["model"] = call.model
    if call.asks_usage:
        options = call.body.get("stream_options")
        changes["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
    if backend.kind == "vllm":
        changes["cache_salt"] = salt
    dropped = call.warnings or any(name in call.body for name in OWN_FIELDS)
    if not dropped and not changes:
        return call.raw
    if not dropped and call.body and not any(name in call.body for name in changes):
        return call.raw.rstrip()[:-1] + b"," + msgspec.json.encode(changes)[1:]  # the caller's bytes, and ours after
    kept = {name: value for name, value in call.body.items() if name not in OWN_FIELDS}
    return msgspec.json.encode(kept | changes)


def headers_for(call: Call, backend: Backend, salt: str) -> dict[str, str]:
    headers = {"X-Request-Id": call.request_id}
    for name in PASSED_HEADERS:
        if value := call.exchange.header(name):
            headers[name] = value
    if backend.kind == "tonle":
        headers[SALT_HEADER] = salt
    return headers
