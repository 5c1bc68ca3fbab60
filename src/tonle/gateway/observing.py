"""The results of the stages into a `SeenRequest`, as `recording.py` makes the record of the audit.

Does: translate, estimate what a request cost, hand it to `Observed`. Does not: keep a word of a prompt or an answer, or fail.

Texts that callers or backends choose are cut: 5,000 requests must stay small.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from typing import Any

from tonle.edge.exchange import Exchange
from tonle.gateway.backends.backend import Backend
from tonle.gateway.call import Call, ReplyFacts
from tonle.gateway.log_fields import about
from tonle.gateway.stage_results import StageResults
from tonle.gateway.trace_facts import trace_facts
from tonle.observe.observed import Observed
from tonle.observe.seen_request import SeenRequest
from tonle.observe.trace_context import TraceContext
from tonle.observe.tracing import Tracing
from tonle.protocol.answers import Answer
from tonle.telemetry.time_spent import TimeSpent

log = logging.getLogger("tonle.gateway")

MAX_NAME_CHARS = 128
_HOUR_S = 3600.0


class Observer:
    """With nothing to tell it to, it does nothing."""

    def __init__(
        self,
        observed: Observed | None,
        find_backend: Callable[[str], Backend | None],
        tracing: Tracing | None = None,
    ) -> None:
        self._observed = observed
        self._tracing = tracing
        self._find_backend = find_backend

    def began(self, exchange: Exchange) -> None:
        """Which trace it belongs to. Without a collector, a look at one header."""
        headers, tracing = exchange.headers, self._tracing
        exchange.trace = TraceContext.of(headers) if tracing is None else tracing.begin(headers)

    def ended(
        self,
        call: Call,
        facts: ReplyFacts,
        results: StageResults,
        status: str,
        answer: Answer,
        *,
        error: dict[str, Any] | None = None,
        limit: str = "",
    ) -> None:
        """`error`: what went wrong on our side, as the record has it. `limit`: of its key, that refused it."""
        if self._observed is None and self._tracing is None:
            return
        try:
            backend = self._find_backend(results.backend)
            seen = _seen(call, facts, results, status, answer, error, limit, backend)
            if self._observed is not None:
                self._observed.ended(seen)
            if self._tracing is not None:
                self._tracing.ended(seen, trace_facts(call, results, answer))
        except Exception:
            log.exception(
                "what can be seen of a request could not be noted, id %s", call.request_id, extra=about(call.exchange)
            )


def _seen(
    call: Call,
    facts: ReplyFacts,
    results: StageResults,
    status: str,
    answer: Answer,
    error: dict[str, Any] | None,
    limit: str,
    backend: Backend | None,
) -> SeenRequest:
    exchange, request, model, sent = call.exchange, results.request, results.model, results.sent
    # The process may have to wait for a core between two looks at clocks. In this order the request then seems to have arrived
    # early; in the other, after its record was opened, which would not be found (`dashboard/audit_pages.py`).
    now = time.time()
    total_s, arrived_s = exchange.elapsed_s, exchange.arrived_s
    ttft_s, last_s = _token_moments(arrived_s, results, answer)
    prompt_tokens, cached_tokens, completion_tokens = _tokens(results, answer)
    sent_s = None if sent is None else _since(arrived_s, sent.sent_s)
    num_answers = 1 if request is None else max(1, request.num_answers)
    device_s = _device_s(sent_s, last_s or total_s, num_answers, answer.spent, backend) if call.computed else 0.0
    price = None if backend is None else backend.price_per_hour
    trace = exchange.trace
    return SeenRequest(
        id=call.request_id,
        arrived=now - total_s,
        path=exchange.path[:MAX_NAME_CHARS],
        model=_model(results),
        adapter=model.name if model is not None and model.entry.parent else None,
        key_id="" if exchange.key is None else results.key.id,
        key_name="" if exchange.key is None else results.key.name[:MAX_NAME_CHARS],
        owner=_bounded(results.owner or ""),
        status=status,
        http_status=exchange.status,
        error=_error_code(status, exchange.status, answer, error),
        limit=limit,
        stream=request is not None and request.stream,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        completion_tokens=completion_tokens,
        audio_s=results.used_media.audio_s,
        characters=results.used_media.characters,
        images=results.used_media.images,
        computed=call.computed,
        num_answers=num_answers,
        cache=results.lookup.state,
        experiment=None if model is None else model.experiment,
        arm=None if model is None or model.arm is None else model.arm.name,
        backend=results.backend,
        is_local=facts.is_local,
        pool=facts.pool[:MAX_NAME_CHARS],
        why="" if sent is None else sent.why,
        failed=() if sent is None else sent.failed,
        fallback="" if model is None else model.fallback or "",
        region=(results.region or "")[:MAX_NAME_CHARS] if results.backend else "",
        trace_id="" if trace is None else trace.trace_id,
        span_id="" if trace is None else trace.span_id,
        accepted_s=_since(arrived_s, results.accepted_s),
        queued_s=0.0 if sent is None else sent.queued_s,
        sent_s=sent_s,
        first_byte_s=None if sent is None else _since(arrived_s, sent.first_byte_s),
        ttft_s=ttft_s,
        last_s=last_s,
        total_s=total_s,
        engine_s=answer.engine_s,
        spent=answer.spent,
        device_s=device_s,
        cost=None if price is None or sent_s is None else price / _HOUR_S * device_s,
    )


def _since(arrived_s: float, moment_s: float | None) -> float | None:
    return None if moment_s is None else max(0.0, moment_s - arrived_s)


def _token_moments(arrived_s: float, results: StageResults, answer: Answer) -> tuple[float | None, float | None]:
    """When the first and the last token came. Of an answer that is not a stream only its engine knows the first one."""
    sent, request = results.sent, results.request
    last_s = _since(arrived_s, answer.last_s)
    if request is not None and request.stream:
        return _since(arrived_s, answer.first_s), last_s
    engine_s = answer.engine_s or {}
    if sent is None or sent.sent_s is None or "prefill" not in engine_s:
        return None, last_s
    ttft_s = sent.sent_s - arrived_s + engine_s.get("queue", 0.0) + engine_s["prefill"]
    return ttft_s, ttft_s + engine_s.get("decode", 0.0)


def _tokens(results: StageResults, answer: Answer) -> tuple[int, int, int]:
    """Of the prompt, of these found in a prefix cache, of the answer: as the backend counts, or estimated if it does not."""
    usage = answer.usage or {}
    details = usage.get("prompt_tokens_details")
    cached = _number(
        details.get("cached_tokens") if isinstance(details, dict) else usage.get("cache_read_input_tokens")
    )
    if results.sent is not None:
        used = results.sent.used
        return used.prompt, min(cached, used.prompt), used.new
    prompt = _number(usage.get("prompt_tokens", usage.get("input_tokens")))
    return prompt, min(cached, prompt), _number(usage.get("completion_tokens", usage.get("output_tokens")))


def _number(value: object) -> int:
    """A server may say anything."""
    return value if isinstance(value, int) and 0 < value < 1 << 53 else 0


def _device_s(
    sent_s: float | None, until_s: float, num_answers: int, spent: TimeSpent | None, backend: Backend | None
) -> float:
    """Its share of the device. Of a backend elsewhere: its time there, shared with the requests that are there when it ends."""
    if spent is not None:  # of one of its answers, the slowest
        return spent.device_s * num_answers
    if sent_s is None or backend is None:
        return 0.0
    return max(0.0, until_s - sent_s) / (backend.gate.num_inside + 1)  # this one has left


def _model(results: StageResults) -> str:
    if results.model is not None:
        return results.model.asked
    asked = None if results.request is None else results.request.asked_model
    return (asked or "")[:MAX_NAME_CHARS]


def _error_code(status: str, http_status: int, answer: Answer, error: dict[str, Any] | None) -> str | None:
    """Our own, or what the backend gives; else the HTTP status."""
    if error is not None:
        return str(error["code"])[:MAX_NAME_CHARS]
    if status in ("ok", "cached"):
        return None
    theirs = answer.error
    if isinstance(theirs, dict):
        for name in ("code", "type"):
            if isinstance(code := theirs.get(name), str) and code:
                return code[:MAX_NAME_CHARS]
    return f"http_{http_status}" if http_status >= 400 else "broken_stream"


def _bounded(owner: str) -> str:
    """An owner is compared, never shown; a gateway in front may name any."""
    return owner if len(owner) <= MAX_NAME_CHARS else hashlib.sha256(owner.encode()).hexdigest()
