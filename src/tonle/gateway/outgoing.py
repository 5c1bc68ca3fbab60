"""What a backend is sent: the caller's own bytes where nothing must change, else as little changed as possible.

Does: rename the model, ask for usage, add the owner's salt, drop what the gateway has acted on. Does not: send.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tonle.gateway.backends.backend import Backend
from tonle.gateway.backends.transport import SALT_HEADER
from tonle.gateway.call import OWN_FIELDS, Call

PASSED_HEADERS = ("traceparent", "tracestate")
STRICT_HEADER = "x-tonle-strict"

# What the gateway has acted on already. A replica would say it has no effect; elsewhere priorities mean something else.
_DONE = {"tonle": (*OWN_FIELDS, "user")}
_DONE_ELSEWHERE = (*OWN_FIELDS, "priority")


def body_for(call: Call, backend: Backend, salt: str, extra: dict[str, Any] | None = None) -> bytes:
    changes: dict[str, Any] = dict(extra or {})
    if call.model != call.body.get("model"):
        changes["model"] = call.model
    if call.asks_usage and not backend.local:
        options = call.body.get("stream_options")
        changes["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
    if backend.kind == "vllm":
        changes["cache_salt"] = salt
    done = _DONE.get(backend.kind, _DONE_ELSEWHERE)
    dropped = call.rewritten or any(name in call.body for name in done)
    if not dropped and not changes:
        return call.raw
    if not dropped and call.body and not any(name in call.body for name in changes):
        return call.raw.rstrip()[:-1] + b"," + msgspec.json.encode(changes)[1:]  # the caller's bytes, and ours after
    kept = {name: value for name, value in call.body.items() if name not in done}
    return msgspec.json.encode(kept | changes)


def copy_for(call: Call, backend: Backend, salt: str, changes: dict[str, Any], left_out: tuple[str, ...]) -> bytes:
    """A request of our own with the caller's prompt: not streamed, and under the caller's salt."""
    done = (*_DONE.get(backend.kind, _DONE_ELSEWHERE), *left_out)
    body = {name: value for name, value in call.body.items() if name not in done}
    body |= {"stream": False, **changes}
    if backend.kind == "vllm":
        body["cache_salt"] = salt
    return msgspec.json.encode(body)


def headers_for(call: Call, backend: Backend, salt: str) -> dict[str, str]:
    headers = {"X-Request-Id": call.request_id}
    for name in PASSED_HEADERS:
        if value := call.exchange.header(name):
            headers[name] = value
    if backend.kind == "tonle":
        headers[SALT_HEADER] = salt
        if call.strict:
            headers[STRICT_HEADER] = "1"
    return headers
