"""Errors in the shape of the API that a path belongs to.

Does: find the API of a path, write an error's body, or an error event, as its clients read it. Does not: decide what is
an error. What comes in is OpenAI's shape (`protocol/errors.py`), or whatever a backend sent.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from tonle.protocol.openai import about
from tonle.protocol.replies import body_message, error_text

# Anthropic's types by status; any other 4xx is the request's fault, any other 5xx the server's.
_MESSAGES_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip
# The type of an error inside a stream, which has no status, by OpenAI's type or code.
_EVENT_TYPES = {
    "invalid_request_error": "invalid_request_error", "rate_limit_error": "rate_limit_error",
    "service_unavailable_error": "overloaded_error", "upstream_timeout": "timeout_error",
    "deadline_exceeded": "timeout_error",
}  # fmt: skip


class MessagesErrorDetail(msgspec.Struct):
    type: Annotated[str, about("invalid_request_error, authentication_error, rate_limit_error, api_error, …")]
    message: str


class MessagesErrorBody(msgspec.Struct, kw_only=True):
    type: Literal["error"] = "error"
    error: MessagesErrorDetail
    request_id: str


class OllamaErrorBody(msgspec.Struct):
    error: str


def is_messages(path: str) -> bool:
    """It belongs to Anthropic's Messages API."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def is_ollama(path: str) -> bool:
    """It belongs to Ollama's API. What is under /api/v1 is ours."""
    return path.startswith("/api/") and not path.startswith("/api/v1/")


def own_shape(path: str, status: int, body: bytes, request_id: str) -> bytes:
    """The body of an error reply at `path`; as it is where the API is OpenAI's."""
    if is_messages(path):
        return messages_error(status, body_message(body), request_id)
    if is_ollama(path):
        return ollama_error(body_message(body))
    return body


def messages_error(status: int, message: str, request_id: str) -> bytes:
    kind = _MESSAGES_TYPES.get(status) or ("invalid_request_error" if 400 <= status < 500 else "api_error")
    return msgspec.json.encode(_messages_body(kind, message, request_id))


def messages_event(error: Any, request_id: str) -> MessagesErrorBody:
    """`error`: what stands under that name in an event of a stream."""
    facts = error if isinstance(error, dict) else {}
    kinds = [_EVENT_TYPES[name] for name in (facts.get("code"), facts.get("type")) if name in _EVENT_TYPES]
    return _messages_body(kinds[0] if kinds else "api_error", error_text(error), request_id)


def _messages_body(kind: str, message: str, request_id: str) -> MessagesErrorBody:
    return MessagesErrorBody(error=MessagesErrorDetail(kind, message), request_id=request_id)


def ollama_error(message: str) -> bytes:
    return msgspec.json.encode(OllamaErrorBody(message))
