"""The spans of one request, made when it has ended: this server's, one per backend that was sent it, and the engine's.

    gateway:   POST /v1/chat/completions (server)  →  chat MODEL (client), one per attempt
    replica:   POST /v1/chat/completions (server)  →  queue, prefill, decode

Does: turn a `SeenRequest` into OpenTelemetry's `ReadableSpan`s with the times it holds. Does not: send them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.span import TraceState
from opentelemetry.trace.status import Status, StatusCode

from tonle.observe.gen_ai import (
    PROVIDER,
    latency_attributes,
    operation_of,
    provider_of,
    request_attributes,
    response_attributes,
)
from tonle.observe.seen_request import SeenRequest
from tonle.observe.trace_context import new_span_id
from tonle.observe.trace_facts import SentAttempt, TraceFacts
from tonle.telemetry.time_spent import TimeSpent

NS = 1_000_000_000
SCOPE_NAME = "tonle"

_FINE, _FAILED = Status(StatusCode.UNSET), Status(StatusCode.ERROR)
_FAILURES = ("failed", "interrupted")  # ends of requests that are this side's fault
_RECORDED = TraceFlags(TraceFlags.SAMPLED)


class SpanMaker:
    def __init__(self, resource: Resource, version: str) -> None:
        self._resource = resource
        self._scope = InstrumentationScope(SCOPE_NAME, version)

    def spans(self, seen: SeenRequest, trace: TraceFacts) -> list[ReadableSpan]:
        family = _Family(self, seen, trace)
        return [family.server(), *family.clients(), *family.engine()]

    def make(
        self, name: str, context: SpanContext, parent: SpanContext | None, *, attributes: dict[str, Any],
        start_ns: int, end_ns: int, kind: SpanKind = SpanKind.INTERNAL, failed: bool = False,
    ) -> ReadableSpan:  # fmt: skip
        return ReadableSpan(
            name, context, parent, self._resource, attributes, kind=kind, status=_FAILED if failed else _FINE,
            start_time=start_ns, end_time=max(start_ns, end_ns), instrumentation_scope=self._scope,
        )  # fmt: skip


class _Family:
    """The spans of one request, which share a trace and a clock."""

    def __init__(self, maker: SpanMaker, seen: SeenRequest, trace: TraceFacts) -> None:
        self._maker = maker
        self._seen = seen
        self._trace = trace
        context = trace.context
        self._trace_id = int(context.trace_id, 16)
        self._state = TraceState.from_header([context.state]) if context.state else None
        self._arrived_ns = int(seen.arrived * NS)
        self._own = self._context(context.span_id)
        self._caller = self._context(context.parent_id, is_remote=True) if context.parent_id else None

    def _context(self, span_id: str, *, is_remote: bool = False) -> SpanContext:
        return SpanContext(self._trace_id, int(span_id, 16), is_remote, _RECORDED, self._state)

    def _ns(self, moment_s: float) -> int:
        return self._arrived_ns + int(moment_s * NS)

    def _asked(self, provider: str) -> dict[str, Any]:
        return request_attributes(self._seen, self._trace, provider)

    def server(self) -> ReadableSpan:
        seen, method = self._seen, self._trace.method
        attributes = self._asked(PROVIDER) | response_attributes(seen, self._trace) | latency_attributes(seen)
        attributes |= {
            "http.request.method": method,
            "http.route": seen.path,
            "url.path": seen.path,
            "gen_ai.request.id": seen.id,
            "tonle.status": seen.status,
            "tonle.cache": seen.cache,
        }
        if seen.http_status:
            attributes["http.response.status_code"] = seen.http_status
        if error := _error_of(seen):
            attributes["error.type"] = error
        for name, value in (
            ("tonle.key.id", seen.key_id), ("tonle.adapter", seen.adapter), ("tonle.backend", seen.backend),
            ("tonle.backend.why", seen.why), ("tonle.experiment", seen.experiment), ("tonle.arm", seen.arm),
        ):  # fmt: skip
            if value:
                attributes[name] = value
        if seen.cost is not None:
            attributes["tonle.cost"] = seen.cost
        failed = seen.http_status >= 500 or seen.status in _FAILURES
        return self._maker.make(
            f"{method} {seen.path}", self._own, self._caller, attributes=attributes, kind=SpanKind.SERVER, failed=failed,
            start_ns=self._arrived_ns, end_ns=self._ns(seen.total_s),
        )  # fmt: skip

    def clients(self) -> list[ReadableSpan]:
        """Retries, hedges and prefill legs are further ones."""
        return [self._client(sent, place) for place, sent in enumerate(self._trace.sends)]

    def _client(self, sent: SentAttempt, place: int) -> ReadableSpan:
        seen = self._seen
        host, port = _address(sent.url)
        attributes = self._asked(provider_of(sent.kind))
        attributes |= {"http.request.method": "POST", "server.address": host, "server.port": port}
        attributes["tonle.backend"] = sent.backend
        if sent.status:
            attributes["http.response.status_code"] = sent.status
        if place:
            attributes["http.request.resend_count"] = place
        failed = bool(sent.error) or sent.status >= 400
        if failed:
            attributes["error.type"] = sent.error or str(sent.status)
        elif sent.backend == seen.backend:
            attributes |= response_attributes(seen, self._trace)
        return self._maker.make(
            f"{operation_of(seen.path)} {seen.model}".rstrip(), self._context(sent.span_id), self._own,
            attributes=attributes, kind=SpanKind.CLIENT, failed=failed,
            start_ns=self._ns(sent.began_s), end_ns=self._ns(sent.ended_s),
        )  # fmt: skip

    def engine(self) -> list[ReadableSpan]:
        """Of the engine in this process; one elsewhere tells its own, from its own server."""
        seen = self._seen
        if not seen.is_local or not seen.engine_s or seen.sent_s is None:
            return []
        parts = [(name, seen.engine_s[name]) for name in ("queue", "prefill", "decode") if name in seen.engine_s]
        moment_s = seen.sent_s
        if "decode" in seen.engine_s:  # what lies between is the tokenizer's
            last_s = seen.total_s if seen.last_s is None else seen.last_s
            moment_s = max(moment_s, last_s - sum(seconds for _, seconds in parts))
        spans = []
        for name, seconds in parts:
            end_s = min(moment_s + seconds, seen.total_s)
            spans.append(self._maker.make(
                name, self._context(new_span_id()), self._own, attributes=_engine_attributes(name, seen.spent),
                start_ns=self._ns(moment_s), end_ns=self._ns(end_s),
            ))  # fmt: skip
            moment_s = end_s
        return spans


def _error_of(seen: SeenRequest) -> str:
    """The code of what went wrong, never its words: those may be the caller's."""
    if seen.error:
        return seen.error
    return str(seen.http_status) if seen.http_status >= 400 else ""


def _engine_attributes(name: str, spent: TimeSpent | None) -> dict[str, Any]:
    """Where the time went, seconds; as far as the engine tells."""
    if spent is None:
        return {}
    if name == "queue":
        return {f"tonle.wait.{wait.why}_s": wait.seconds for wait in spent.waits}
    if name == "prefill":
        return {
            "tonle.prefill.cached_tokens": spent.cached_tokens, "tonle.prefill.computed_tokens": spent.computed_tokens,
            "tonle.prefill.chunks": spent.num_chunks, "tonle.prefill.waited_s": spent.prefill_waited_s,
        }  # fmt: skip
    return {
        "tonle.decode.steps": spent.num_steps, "tonle.decode.stalled_s": spent.stalled_s,
        "tonle.decode.preempted_s": spent.preempted_s, "tonle.decode.preemptions": spent.num_preemptions,
        "tonle.decode.draft_tokens": spent.draft_tokens, "tonle.decode.accepted_tokens": spent.accepted_tokens,
    }  # fmt: skip


@lru_cache(maxsize=256)
def _address(url: str) -> tuple[str, int]:
    """Host and port of a backend, whose address was checked when it was set."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
