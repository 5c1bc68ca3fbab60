"""What the spans of a request tell, from the results of the stages.

Does: translate, for requests that are recorded in a trace. Does not: make spans (`observe/otel_spans.py`).
"""

from __future__ import annotations

from typing import Any

from tonle.gateway.call import Call
from tonle.gateway.stage_results import StageResults
from tonle.observe.trace_context import TraceContext
from tonle.observe.trace_facts import TraceFacts
from tonle.protocol.answers import Answer

MAX_CHARS = 200  # of a text that a backend chose: an id, a model's name, why it stopped
MAX_REASONS = 16

# Fields of a body -> what spans call them. Numbers only.
_ASKED = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "seed": "seed",
    "n": "choice.count",
}


def trace_facts(call: Call, results: StageResults, answer: Answer) -> TraceFacts | None:
    """None: no span is made of it."""
    trace: TraceContext | None = call.exchange.trace
    if trace is None or not trace.is_recorded:
        return None
    request = results.request
    reasons = [choice.finish_reason for _, choice in sorted(answer.choices.items())][:MAX_REASONS]
    return TraceFacts(
        context=trace,
        method=call.exchange.method,
        sends=() if results.sent is None else results.sent.sends,
        asked={} if request is None else _asked(request.body),
        response_id=_short(call.answer_id or answer.response_id),
        response_model=_short(answer.model),
        finish_reasons=tuple(_short(reason) for reason in reasons if reason),
    )


def _asked(body: dict[str, Any]) -> dict[str, int | float]:
    """A flag is no number, and a number that no collector could store is left out."""
    return {
        name: value
        for field, name in _ASKED.items()
        if isinstance(value := body.get(field), int | float) and not isinstance(value, bool) and abs(value) < 2**63
    }


def _short(text: object) -> str:
    """A server may say anything."""
    return text[:MAX_CHARS] if isinstance(text, str) else ""
