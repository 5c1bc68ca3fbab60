"""The words of OpenTelemetry's conventions for generative AI (`gen_ai.…`) and of vLLM's latency attributes, for one request.

Does: name the operation of a path, build attributes from a `SeenRequest`. Does not: import OpenTelemetry. No attribute has a
word of a prompt or an answer in it.
"""

from __future__ import annotations

from typing import Any

from tonle.observe.seen_request import SeenRequest
from tonle.observe.trace_facts import TraceFacts

PROVIDER = "tonle"
_PROVIDERS = {"tonle": "tonle", "vllm": "vllm"}  # by the kind of a backend; the others speak OpenAI's API

# Paths -> operations: the convention's names where it has one.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/messages/count_tokens": "count_tokens",
    "/api/v1/inference": "chat",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
}


def operation_of(path: str) -> str:
    """`/v1/rerank` and others that the convention has no name for: the last part of their path."""
    return _OPERATIONS.get(path) or path.rpartition("/")[2] or "other"


def provider_of(kind: str) -> str:
    return _PROVIDERS.get(kind, "openai")


def request_attributes(seen: SeenRequest, trace: TraceFacts, provider: str) -> dict[str, Any]:
    """What was asked for."""
    attributes: dict[str, Any] = {"gen_ai.operation.name": operation_of(seen.path), "gen_ai.provider.name": provider}
    if seen.model:
        attributes["gen_ai.request.model"] = seen.model
    if seen.stream:
        attributes["gen_ai.request.stream"] = True
    return attributes | {f"gen_ai.request.{name}": value for name, value in trace.asked.items()}


def response_attributes(seen: SeenRequest, trace: TraceFacts) -> dict[str, Any]:
    """What came back."""
    attributes: dict[str, Any] = {}
    if trace.response_id:
        attributes["gen_ai.response.id"] = trace.response_id
    if trace.response_model:
        attributes["gen_ai.response.model"] = trace.response_model
    if trace.finish_reasons:
        attributes["gen_ai.response.finish_reasons"] = list(trace.finish_reasons)
    if seen.prompt_tokens or seen.completion_tokens:
        attributes["gen_ai.usage.input_tokens"] = seen.prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = seen.completion_tokens
    if seen.cached_tokens:
        attributes["gen_ai.usage.cache_read.input_tokens"] = seen.cached_tokens
    return attributes


def latency_attributes(seen: SeenRequest) -> dict[str, Any]:
    """Seconds, under vLLM's names. The queue is that of this server and of the engine together."""
    engine = seen.engine_s or {}
    attributes: dict[str, Any] = {"gen_ai.latency.e2e": seen.total_s}
    if seen.ttft_s is not None:
        attributes["gen_ai.latency.time_to_first_token"] = seen.ttft_s
    if seen.sent_s is not None or seen.queued_s:
        attributes["gen_ai.latency.time_in_queue"] = seen.queued_s + engine.get("queue", 0.0)
    if "prefill" in engine:
        attributes["gen_ai.latency.time_in_model_prefill"] = engine["prefill"]
    if "decode" in engine:
        attributes["gen_ai.latency.time_in_model_decode"] = engine["decode"]
        attributes["gen_ai.latency.time_in_model_inference"] = engine.get("prefill", 0.0) + engine["decode"]
    return attributes
