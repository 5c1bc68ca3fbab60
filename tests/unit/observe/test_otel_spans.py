"""What a collector is told about a request that has ended."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind
from opentelemetry.trace.status import StatusCode

from tonle.observe.otel_spans import NS, SpanMaker
from tonle.observe.seen_request import SeenRequest
from tonle.observe.trace_context import TraceContext
from tonle.observe.trace_facts import SentAttempt, TraceFacts
from tonle.telemetry.time_spent import TimeSpent, Wait

ARRIVED = 1_800_000_000.0
CALLER = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "", "00f067aa0ba902b7", True, "vendor=1").joined()
MAKER = SpanMaker(Resource({"service.name": "tonle-test"}), "1.2.3")


def seen(**fields: Any) -> SeenRequest:
    given: dict[str, Any] = {
        "id": "req-1", "arrived": ARRIVED, "path": "/v1/chat/completions", "model": "m", "status": "ok",
        "http_status": 200, "total_s": 2.0,
    }  # fmt: skip
    return SeenRequest(**(given | fields))


def facts(**fields: Any) -> TraceFacts:
    return TraceFacts(**({"context": CALLER, "method": "POST"} | fields))


def spans(trace: TraceFacts | None = None, **fields: Any) -> list[ReadableSpan]:
    return MAKER.spans(seen(**fields), trace or facts())


def sent(**fields: Any) -> SentAttempt:
    given: dict[str, Any] = {"span_id": "a" * 16, "backend": "b0", "url": "http://10.0.0.7:8001/v1", "kind": "vllm",
                             "began_s": 0.25, "ended_s": 1.5, "status": 200}  # fmt: skip
    return SentAttempt(**(given | fields))


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def ids(span: ReadableSpan) -> tuple[str, str, str]:
    """Trace, span, parent."""
    context, parent = span.context, span.parent
    assert context is not None
    return f"{context.trace_id:032x}", f"{context.span_id:016x}", "" if parent is None else f"{parent.span_id:016x}"


def moments(span: ReadableSpan) -> tuple[float, float]:
    """Seconds since the request arrived, to the microsecond."""
    assert span.start_time is not None and span.end_time is not None
    return tuple(round((at - int(ARRIVED * NS)) / NS, 6) for at in (span.start_time, span.end_time))  # type: ignore[return-value]


def test_the_servers_span() -> None:
    told = facts(asked={"max_tokens": 16, "temperature": 0.5}, response_id="chatcmpl-1", response_model="m-0613",
                 finish_reasons=("stop", "length"))  # fmt: skip
    (span,) = spans(
        told, prompt_tokens=7, completion_tokens=3, cached_tokens=4, ttft_s=0.5, stream=True, key_id="k1",
        cache="miss", adapter="ad", experiment="e", arm="x",
    )  # fmt: skip
    assert span.name == "POST /v1/chat/completions" and span.kind is SpanKind.SERVER
    assert span.status.status_code is StatusCode.UNSET
    assert ids(span) == (CALLER.trace_id, CALLER.span_id, "00f067aa0ba902b7")
    assert span.parent is not None and span.parent.is_remote
    assert span.context is not None and dict(span.context.trace_state) == {"vendor": "1"}
    assert moments(span) == (0.0, 2.0)
    assert span.resource.attributes["service.name"] == "tonle-test"
    assert attributes(span) == {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "tonle", "gen_ai.request.model": "m",
        "gen_ai.request.stream": True, "gen_ai.request.max_tokens": 16, "gen_ai.request.temperature": 0.5,
        "gen_ai.response.id": "chatcmpl-1", "gen_ai.response.model": "m-0613",
        "gen_ai.response.finish_reasons": ["stop", "length"], "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3, "gen_ai.usage.cache_read.input_tokens": 4, "gen_ai.latency.e2e": 2.0,
        "gen_ai.latency.time_to_first_token": 0.5, "gen_ai.request.id": "req-1", "http.request.method": "POST",
        "http.route": "/v1/chat/completions", "url.path": "/v1/chat/completions", "http.response.status_code": 200,
        "tonle.status": "ok", "tonle.cache": "miss", "tonle.key.id": "k1", "tonle.adapter": "ad",
        "tonle.experiment": "e", "tonle.arm": "x",
    }  # fmt: skip


def test_a_trace_that_begins_here_has_no_parent() -> None:
    begun = TraceContext.begin(sampled=True)
    (span,) = spans(facts(context=begun))
    assert ids(span) == (begun.trace_id, begun.span_id, "")


@pytest.mark.parametrize(
    ("fields", "error", "failed"),
    [
        ({"status": "refused", "http_status": 401, "error": "invalid_api_key"}, "invalid_api_key", False),
        ({"status": "failed", "http_status": 502, "error": "upstream_failed"}, "upstream_failed", True),
        ({"status": "failed", "http_status": 200}, None, True),  # a stream that broke off
        ({"status": "refused", "http_status": 429}, "429", False),
        ({"status": "cancelled", "http_status": 0, "error": "cancelled"}, "cancelled", False),
        ({"status": "interrupted", "http_status": 503, "error": "cancelled"}, "cancelled", True),
    ],
)
def test_whose_fault_it_was(fields: dict[str, Any], error: str | None, failed: bool) -> None:
    (span,) = spans(**fields)
    assert attributes(span).get("error.type") == error
    assert (span.status.status_code is StatusCode.ERROR) == failed
    assert span.status.description is None  # words may be the caller's


def test_each_send_is_a_client_span() -> None:
    dead = sent(span_id="d" * 16, backend="dead", url="https://dead", kind="auto", status=0, error="connection refused",
                began_s=0.1, ended_s=0.2)  # fmt: skip
    busy = sent(span_id="c" * 16, backend="busy", kind="tonle", status=503, began_s=0.2, ended_s=0.24)
    server, *clients = spans(facts(sends=(dead, busy, sent())), backend="b0", completion_tokens=3)
    assert [ids(span) for span in clients] == [
        (CALLER.trace_id, letter * 16, CALLER.span_id) for letter in ("d", "c", "a")
    ]
    assert all(span.kind is SpanKind.CLIENT and span.name == "chat m" for span in clients)
    first, second, third = (attributes(span) for span in clients)
    assert (first["server.address"], first["server.port"], first["error.type"]) == ("dead", 443, "connection refused")
    assert "http.response.status_code" not in first and "http.request.resend_count" not in first
    assert (second["error.type"], second["gen_ai.provider.name"]) == ("503", "tonle")
    assert (third["server.address"], third["server.port"], third["http.request.resend_count"]) == ("10.0.0.7", 8001, 2)
    assert third["gen_ai.provider.name"] == "vllm" and first["gen_ai.provider.name"] == "openai"
    assert [span.status.status_code is StatusCode.ERROR for span in clients] == [True, True, False]
    assert "gen_ai.usage.output_tokens" in third and "gen_ai.usage.output_tokens" not in second
    assert moments(clients[2]) == (0.25, 1.5)
    assert attributes(server)["tonle.backend"] == "b0"


def test_the_engine_of_this_process_has_three_spans_that_follow_each_other() -> None:
    spent = TimeSpent(
        queue_s=0.5, waits=[Wait("rows", 0.4), Wait("step", 0.1)], prefill_s=0.25, decode_s=0.75, cached_tokens=16,
        computed_tokens=5, num_chunks=1, num_steps=9, stalled_s=0.1, num_preemptions=1, preempted_s=0.05,
    )  # fmt: skip
    server, queue, prefill, decode = spans(is_local=True, backend="local", sent_s=0.1, last_s=1.75, spent=spent,
                                           engine_s={"queue": 0.5, "prefill": 0.25, "decode": 0.75})  # fmt: skip
    assert [span.name for span in (queue, prefill, decode)] == ["queue", "prefill", "decode"]
    assert [moments(span) for span in (queue, prefill, decode)] == [(0.25, 0.75), (0.75, 1.0), (1.0, 1.75)]
    assert {ids(span)[2] for span in (queue, prefill, decode)} == {CALLER.span_id}
    assert attributes(queue) == {"tonle.wait.rows_s": 0.4, "tonle.wait.step_s": 0.1}
    assert attributes(prefill)["tonle.prefill.cached_tokens"] == 16
    assert attributes(decode)["tonle.decode.stalled_s"] == 0.1
    told = attributes(server)
    assert told["gen_ai.latency.time_in_queue"] == 0.5 and told["gen_ai.latency.time_in_model_prefill"] == 0.25
    assert told["gen_ai.latency.time_in_model_decode"] == 0.75
    assert told["gen_ai.latency.time_in_model_inference"] == 1.0


def test_an_engine_that_was_cut_short_tells_what_it_did() -> None:
    _, queue, prefill = spans(is_local=True, sent_s=0.1, total_s=0.5, engine_s={"queue": 0.2, "prefill": 0.7})
    assert moments(queue) == (0.1, 0.3) and moments(prefill) == (0.3, 0.5)  # no span outlasts its request


def test_the_engine_of_another_server_tells_its_own() -> None:
    found = spans(facts(sends=(sent(),)), backend="b0", sent_s=0.1, engine_s={"queue": 0.2, "prefill": 0.7})
    assert [span.kind for span in found] == [SpanKind.SERVER, SpanKind.CLIENT]


@pytest.mark.parametrize(
    ("path", "operation"),
    [("/v1/messages", "chat"), ("/api/generate", "text_completion"), ("/v1/embeddings", "embeddings"),
     ("/v1/rerank", "rerank"), ("/tokenize", "tokenize")],
)  # fmt: skip
def test_operations(path: str, operation: str) -> None:
    (span,) = spans(path=path)
    assert attributes(span)["gen_ai.operation.name"] == operation
