"""The endpoints of APIs that are translated into chat completions: what the docs page and /openapi.json say about them.

Does: describe. Does not: route or translate (`gateway/apis/`).
"""

from __future__ import annotations

from typing import Any

from tonle.gateway.apis.error_shapes import MessagesErrorBody, OllamaErrorBody
from tonle.gateway.apis.messages.request import CountTokensRequest, MessagesRequest
from tonle.gateway.apis.ollama.pages import OllamaShowRequest
from tonle.gateway.apis.ollama.reply import NDJSON
from tonle.gateway.apis.ollama.request import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
)
from tonle.gateway.apis.responses.request import ResponsesRequest
from tonle.replica.catalog_entry import CatalogEntry

_QUESTION: dict[str, Any] = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
_EVENTS = "With stream: true. Events `message_start`, `content_block_delta` and so on; the last one is `message_stop`."
_LINES = "Unless stream is false: a JSON object per line; in the last one `done` is true."

_RESPONSE_EVENTS = (
    "With stream: true. Events `response.created`, `response.output_text.delta` and so on; the last one is "
    "`response.completed`."
)

TRANSLATED_ENTRIES = (
    CatalogEntry(
        "POST", "/v1/responses", "OpenAI's Responses API; with stream, as server-sent events.",
        ResponsesRequest, streams=True, stream_text=_RESPONSE_EVENTS,
        example={"input": "What is the capital of France?", "max_output_tokens": 50},
    ),
    CatalogEntry("GET", "/v1/responses/{id}", "A stored response."),
    CatalogEntry("DELETE", "/v1/responses/{id}", "Delete it."),
    CatalogEntry("GET", "/v1/responses/{id}/input_items", "The items that its request gave as input."),
    CatalogEntry(
        "POST", "/v1/messages", "Anthropic's API: answer a conversation; with stream, as server-sent events.",
        MessagesRequest, streams=True, stream_text=_EVENTS, error=MessagesErrorBody,
        example={"max_tokens": 50, **_QUESTION},
    ),
    CatalogEntry(
        "POST", "/v1/messages/count_tokens", "Anthropic's API: how many tokens a conversation has.", CountTokensRequest,
        error=MessagesErrorBody, example=_QUESTION,
    ),
    CatalogEntry(
        "POST", "/api/chat", "Ollama's API: answer a conversation, by default as lines of JSON.", OllamaChatRequest,
        streams=True, stream_text=_LINES, stream_media=NDJSON, error=OllamaErrorBody,
        example={"stream": False, **_QUESTION},
    ),
    CatalogEntry(
        "POST", "/api/generate", "Ollama's API: answer a prompt, by default as lines of JSON.", OllamaGenerateRequest,
        streams=True, stream_text=_LINES, stream_media=NDJSON, error=OllamaErrorBody,
        example={"stream": False, "prompt": "What is the capital of France?"},
    ),
    CatalogEntry(
        "POST", "/api/embed", "Ollama's API: vectors of texts.", OllamaEmbedRequest, error=OllamaErrorBody,
        example={"input": ["What is the capital of France?", "Paris"]},
    ),
    CatalogEntry("POST", "/api/embeddings", "Ollama's API: the vector of a text, in the older form.",
                 OllamaEmbeddingsRequest, error=OllamaErrorBody, example={"prompt": "What is the capital of France?"}),
    CatalogEntry("GET", "/api/tags", "Ollama's API: the models.", error=OllamaErrorBody),
    CatalogEntry("GET", "/api/ps", "Ollama's API: the models that are loaded, which all are.", error=OllamaErrorBody),
    CatalogEntry("POST", "/api/show", "Ollama's API: facts about a model.", OllamaShowRequest, error=OllamaErrorBody),
    CatalogEntry("GET", "/api/version", "Ollama's API: the version of that API.", error=OllamaErrorBody),
    CatalogEntry("GET", "/", "Says that the server runs, in the words that clients of Ollama look for.",
                 media="text/plain"),
)  # fmt: skip
