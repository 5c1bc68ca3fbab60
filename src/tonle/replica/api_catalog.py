"""Every endpoint with its types and an example: what the docs page and /openapi.json are made from.

Does: describe. Does not: route (`gateway/routes.py`); a test holds the two together.
"""

from __future__ import annotations

import functools
import re
from typing import Annotated, Any

import msgspec

from tonle import __version__
from tonle.gateway.admin import KeyRequest
from tonle.gateway.inference_service import InferenceRequest
from tonle.protocol.adapters import LOAD_PATH, UNLOAD_PATH, LoadAdapterRequest, UnloadAdapterRequest
from tonle.protocol.embeddings import (
    RERANK_PATHS,
    SCORE_PATHS,
    EmbeddingList,
    EmbeddingRequest,
    Ranking,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from tonle.protocol.openai import (
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    Detokenized,
    DetokenizeRequest,
    Health,
    ModelInfo,
    ModelList,
    TokenizeRequest,
    Tokens,
    about,
)
from tonle.replica.catalog_entry import CatalogEntry
from tonle.replica.translated_catalog import TRANSLATED_ENTRIES


class HealthReport(Health, kw_only=True):
    """What `/health` replies: the engine's part, and the server's (`gateway/routes.py`)."""

    meets_sla: Annotated[bool, about("Whether the p95 latency of recent requests is within the target.")]
    sla_target_p95_s: float
    requests: Annotated[int, about("Recent requests, which the numbers below are about.")]
    failed: int
    latency_s: Annotated[dict[str, float], about("p50, p95 and p99.")]
    burn_rate: Annotated[float, about("1 = exactly 5 % of the requests are slower than the target.")]
    why_not: Annotated[
        dict[str, Any] | None, about("Where slow requests spent their time; only if the target is missed.")
    ] = None
    shared_state: Annotated[str | None, about("ok or lost; only with keys and limits in Redis or PostgreSQL.")] = None
    cache: Annotated[dict[str, float] | None, about("Entries and hit rate of the response cache.")] = None


_REF = "#/components/schemas/{name}"


ENTRIES = (
    CatalogEntry(
        "POST", "/v1/chat/completions", "Answer a conversation; with stream, as server-sent events.",
        ChatRequest, ChatCompletion, streams=True, chunk=ChatChunk,
        example={"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 50},
    ),
    CatalogEntry(
        "POST", "/v1/completions", "Continue a text; with stream, as server-sent events.",
        CompletionRequest, Completion, streams=True, chunk=Completion,
        example={"prompt": "The capital of France is", "max_tokens": 16},
    ),
    CatalogEntry(
        "POST", "/api/v1/inference", "Answer a question with its history; with stream, as server-sent events.",
        InferenceRequest, streams=True, example={"user_input": "What is the capital of France?"},
    ),
    CatalogEntry(
        "POST", "/v1/embeddings", "Vectors of texts.", EmbeddingRequest, EmbeddingList,
        example={"input": ["What is the capital of France?", "Paris"], "encoding_format": "float"},
    ),
    *(
        CatalogEntry(
            "POST", path, "Sort documents by how well they fit a query.", RerankRequest, Ranking,
            example={"query": "What is the capital of France?", "documents": ["Paris is in France.", "Cats purr."]},
        )
        for path in RERANK_PATHS
    ),
    *(
        CatalogEntry(
            "POST", path, "How well documents fit a query.", ScoreRequest, ScoreList,
            example={"text_1": "What is the capital of France?", "text_2": ["Paris is in France.", "Cats purr."]},
        )
        for path in SCORE_PATHS
    ),
    *TRANSLATED_ENTRIES,
    CatalogEntry("GET", "/v1/models", "The names of the model, and its LoRA adapters.", reply=ModelList),
    CatalogEntry("GET", "/v1/models/{id}", "One of these.", reply=ModelInfo),
    CatalogEntry("GET", "/v1/requests/{id}/explain", "Where the time of a request went; the id is X-Request-Id of its reply."),
    CatalogEntry(
        "POST", "/tokenize", "Split a prompt or a conversation into tokens.", TokenizeRequest, Tokens,
        example={"prompt": "Hello, world", "return_token_strs": True},
    ),
    CatalogEntry("POST", "/detokenize", "Turn tokens back into text.", DetokenizeRequest, Detokenized,
          example={"tokens": [1, 2, 3]}),
    CatalogEntry("GET", "/health", "Health, load and latency; 503 when unhealthy.", reply=HealthReport),
    CatalogEntry("GET", "/health/live", "200 while the process runs."),
    CatalogEntry("GET", "/health/ready", "200 when requests will be served, 503 with the reason otherwise."),
    CatalogEntry("GET", "/metrics", "Prometheus metrics.", media="text/plain"),
    CatalogEntry("GET", "/version", "The version of Tonle."),
    CatalogEntry("POST", "/cache/clear", "Empty the response cache; needs an admin key where there are keys."),
    CatalogEntry(
        "POST", LOAD_PATH, "Load a LoRA adapter from a folder on the server's machine; needs an admin key where there are keys.",
        LoadAdapterRequest, media="text/plain",
    ),
    CatalogEntry(
        "POST", UNLOAD_PATH, "Remove a LoRA adapter; needs an admin key where there are keys.", UnloadAdapterRequest,
        media="text/plain",
    ),
    CatalogEntry("GET", "/admin/keys", "List the API keys. Under /admin, reading needs scope dashboard, all else scope admin."),
    CatalogEntry("POST", "/admin/keys", "Create a key; its secret is shown once.", KeyRequest),
    CatalogEntry("DELETE", "/admin/keys/{id}", "Revoke a key."),
    CatalogEntry("GET", "/admin/backends", "The engine behind this server, its load and health."),
    CatalogEntry("POST", "/admin/backends/{name}/drain", "Stop sending it new requests."),
    CatalogEntry("POST", "/admin/backends/{name}/resume", "Send it requests again."),
    CatalogEntry("GET", "/admin/experiments", "A/B experiments with their reports; a gateway has them."),
    CatalogEntry("POST", "/admin/experiments/{name}/start", "Split requests between the arms again."),
    CatalogEntry("POST", "/admin/experiments/{name}/stop", "Serve requests as if there were no experiment."),
    CatalogEntry("GET", "/docs", "This page.", media="text/html"),
    CatalogEntry("GET", "/openapi.json", "The API in OpenAPI 3.1."),
)  # fmt: skip


@functools.cache
def schemas() -> dict[str, dict[str, Any]]:
    """JSON schema of every type in the catalog, by name."""
    types = {kind for entry in ENTRIES for kind in (entry.request, entry.reply, entry.chunk, entry.error)}
    named = sorted((kind for kind in types if kind is not None), key=lambda kind: kind.__name__)
    return msgspec.json.schema_components(named, ref_template=_REF)[1]


def openapi() -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for entry in ENTRIES:
        paths.setdefault(entry.path, {})[entry.method.lower()] = _operation(entry)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tonle", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas()},
    }


def _operation(entry: CatalogEntry) -> dict[str, Any]:
    ok: dict[str, Any] = {"description": "OK", "content": {entry.media: {"schema": _schema(entry.reply)}}}
    if entry.streams:
        ok["content"][entry.stream_media] = {"schema": _stream(entry)}
    error = {"description": "Error", "content": {"application/json": {"schema": _schema(entry.error)}}}
    operation: dict[str, Any] = {"summary": entry.summary, "responses": {"200": ok, "default": error}}
    if entry.request is not None:
        body: dict[str, Any] = {"schema": _schema(entry.request)}
        if entry.example is not None:
            body["example"] = entry.example
        operation["requestBody"] = {"required": True, "content": {"application/json": body}}
    if found := re.search(r"{(\w+)}", entry.path):
        operation["parameters"] = [{"name": found[1], "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _stream(entry: CatalogEntry) -> dict[str, Any]:
    """Text, by the standard; what its events hold is said in words and, for tools that read it, as a schema."""
    schema = {"type": "string", "description": entry.stream_text}
    if entry.chunk is None:
        return schema
    return schema | {"contentMediaType": "application/json", "contentSchema": _schema(entry.chunk)}


def _schema(kind: type[msgspec.Struct] | None) -> dict[str, Any]:
    return {} if kind is None else {"$ref": _REF.format(name=kind.__name__)}
