"""`TraceFacts`: what the spans of a request tell beyond its `SeenRequest`.

Does: hold. Exists only for requests that are recorded in a trace. Never holds a word of a prompt or an answer.
"""

from __future__ import annotations

import msgspec

from tonle.observe.trace_context import TraceContext


class SentAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was sent to a backend: a client span. Moments are seconds since the caller's request arrived."""

    span_id: str  # went out in its `traceparent`
    backend: str
    url: str  # of that backend
    kind: str  # tonle, vllm, openai; auto: not known yet
    began_s: float
    ended_s: float
    status: int = 0  # of the reply; 0: none came
    error: str = ""  # why there is no whole reply: timeout, refused, cancelled, …


class TraceFacts(msgspec.Struct, frozen=True, kw_only=True):
    context: TraceContext
    method: str
    sends: tuple[SentAttempt, ...] = ()
    asked: dict[str, int | float] = {}  # settings of the request, by their `gen_ai.request.` names
    response_id: str = ""
    response_model: str = ""
    finish_reasons: tuple[str, ...] = ()
