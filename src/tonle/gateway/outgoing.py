"""What a backend is sent: the caller's own bytes where nothing must change, else as little changed as possible.

Does: rename the model, ask for usage, add the owner's salt, drop what the gateway has acted on. Does not: send.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tonle.gateway.backends.backend import Backend
from tonle.gateway.backends.transport import SALT_HEADER
from tonle.gateway.hops import VIA_HEADER, written
from tonle.gateway.parsed_request import OWN_FIELDS
from tonle.gateway.stage_results import AcceptedRequest
from tonle.observe.trace_context import PARENT_HEADER, STATE_HEADER, TraceContext
from tonle.protocol.kv_blocks import KV_BLOCKS_HEADER
from tonle.protocol.media_paths import WORKERS, is_media
from tonle.protocol.multipart import with_field

STRICT_HEADER = "x-tonle-strict"

# What the gateway has acted on already. A replica would warn that it has no effect; elsewhere priorities mean something
# else.
_DONE = {"tonle": (*OWN_FIELDS, "user")}
_DONE_ELSEWHERE = (*OWN_FIELDS, "priority")


def body_for(accepted: AcceptedRequest, backend: Backend, extra: dict[str, Any] | None = None) -> bytes:
    request = accepted.request
    body, changes = request.body, dict(extra or {})
    if request.form is not None:
        same = accepted.model.name == body.get("model")
        return request.raw if same else with_field(request.form, "model", accepted.model.name)
    if accepted.call.path.startswith(WORKERS):  # its fields are its own; the path names it
        return request.raw
    if accepted.model.name != body.get("model"):
        changes["model"] = accepted.model.name
    if request.adds_usage and not backend.local:  # a local backend hands its usage over without any chunk
        options = body.get("stream_options")
        changes["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
    if backend.kind == "vllm" and not is_media(accepted.call.path):
        changes["cache_salt"] = accepted.salt
    done = _done(backend)
    dropped = request.rewritten or any(name in body for name in done)
    if not dropped and not changes:
        return request.raw
    if not dropped and body and not any(name in body for name in changes):
        return request.raw.rstrip()[:-1] + b"," + msgspec.json.encode(changes)[1:]  # the caller's bytes, then ours
    kept = {name: value for name, value in body.items() if name not in done}
    return msgspec.json.encode(kept | changes)


def copy_for(accepted: AcceptedRequest, backend: Backend, changes: dict[str, Any], left_out: tuple[str, ...]) -> bytes:
    """A request of the gateway's own with the caller's prompt: not streamed, and under the caller's salt."""
    done = (*_done(backend), *left_out)
    body = {name: value for name, value in accepted.request.body.items() if name not in done}
    body |= {"stream": False, **changes}
    if backend.kind == "vllm":
        body["cache_salt"] = accepted.salt
    return msgspec.json.encode(body)


def _done(backend: Backend) -> tuple[str, ...]:
    """Another gateway has experiments of its own, in which a user stays in one arm."""
    return OWN_FIELDS if backend.gateway_id is not None else _DONE.get(backend.kind, _DONE_ELSEWHERE)


def headers_for(accepted: AcceptedRequest, backend: Backend, span_id: str = "") -> dict[str, str]:
    """`span_id`: of the span that sends it, where there is one; else it belongs to the span of the caller's request."""
    call = accepted.call
    headers = {"X-Request-Id": call.request_id}
    if accepted.request.form is not None:
        headers["content-type"] = call.exchange.header("content-type")  # its boundary stays, whatever is changed
    trace: TraceContext | None = call.exchange.trace
    if trace is not None and trace.span_id:
        headers |= trace.headers(span_id)
    else:  # this server takes no part in the trace: the caller's own words
        for name in (PARENT_HEADER, STATE_HEADER):
            if value := call.exchange.header(name):
                headers[name] = value
    if accepted.passed and not backend.local:
        headers[VIA_HEADER] = written(accepted.passed)
    if backend.kind == "tonle":
        headers[SALT_HEADER] = accepted.salt
        if backend.row.kv_events or (backend.local and call.exchange.header(KV_BLOCKS_HEADER)):
            headers[KV_BLOCKS_HEADER] = "1"
        if accepted.request.strict:
            headers[STRICT_HEADER] = "1"
    return headers
