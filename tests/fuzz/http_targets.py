"""Requests to a running server and a running gateway: every wire type, every path, and headers that are read."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.fuzz.bodies import ANYTHING, bodies, mangled, written
from tests.fuzz.running import KEY, running_gateway, running_server
from tests.fuzz.target import HttpTarget, Request
from tonle.gateway.admin import KeyRequest
from tonle.gateway.apis.messages.request import CountTokensRequest, MessagesRequest
from tonle.gateway.apis.ollama.pages import OllamaShowRequest
from tonle.gateway.apis.ollama.request import OllamaChatRequest, OllamaEmbedRequest, OllamaGenerateRequest
from tonle.gateway.inference_service import InferenceRequest
from tonle.protocol.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_ARGUMENTS = ["[" * 2000, "[" * 400 + "]" * 400, rb'{"a": "\ud800"}'.decode(), '{"a": NaN}', "9" * 5000, "1e999"]
_TYPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "hi"}]}),
    "/v1/completions": (CompletionRequest, {"prompt": "hi"}),
    "/tokenize": (TokenizeRequest, {"prompt": "hi"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1, 2]}),
    "/api/v1/inference": (InferenceRequest, {"user_input": "hi"}),
    "/admin/keys": (KeyRequest, {"name": "k"}),
    "/v1/messages": (MessagesRequest, {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}),
    "/v1/messages/count_tokens": (CountTokensRequest, {"model": "m", "messages": [{"role": "user", "content": "hi"}]}),
    "/api/chat": (OllamaChatRequest, {"model": "m", "messages": [{"role": "user", "content": "hi"}]}),
    "/api/generate": (OllamaGenerateRequest, {"model": "m", "prompt": "hi"}),
    "/api/embed": (OllamaEmbedRequest, {"model": "m", "input": "hi"}),
    "/api/show": (OllamaShowRequest, {"model": "m"}),
}
_PATHS = [
    *_TYPES, "/v1/embeddings", "/v1/responses", "/v1/messages/batches", "/api/tags", "/", "/v1/rerank", "/v1/score",
    "/cache/clear", "/health", "/v1/models", "/v1/models/x", "/admin/backends/b/drain", "/admin/backends/b/resume", "/nothing",
    "/docs",
    "/v1/chat/completions?a=%00&b[]=%", "/v1/models/%F0%28", "/admin/keys/%2e%2e",
]  # fmt: skip
_HEADERS: dict[str, list[str]] = {
    "X-Request-Deadline-Ms": ["0", "-1", "60000", "9" * 5000, "٣", "1e3", "", "inf"],
    "X-Tonle-Strict": ["1", "true", "maybe"], "X-Use-Cache": ["1", "no", "?"], "Cache-Control": ["no-store", "max-age=x"],
    "X-User-Id": ["u", "", "ÿ" * 300], "X-Request-Id": ["a", "b" * 400, "c d", "{}"], "Traceparent": ["00-x", "ÿ"],
    "X-Forwarded-For": ["1.2.3.4", "x, y", "[::1", "," * 500], "Authorization": [f"Bearer {KEY}", "Bearer ", "Basic x"],
    "X-Tonle-Salt": ["s", "ÿ"], "Accept": ["text/event-stream"], "Origin": ["null", "http://x"], "Cookie": ["a=b;" * 100],
    "Content-Type": ["application/json; charset=utf-16", "text/plain", "", "multipart/form-data"],
}  # fmt: skip


def _post(path: str, *, cases: int, place: Any = running_server) -> HttpTarget:
    struct, valid = _TYPES[path]
    requests = bodies(struct, valid).map(lambda body: Request("POST", path, body))
    where = "serve" if place is running_server else "gateway"
    return HttpTarget(f"{where} {path}", cases, requests, place)


@st.composite
def _tool_chats(draw: st.DrawFn) -> Request:
    """Arguments are JSON in a string in JSON."""
    arguments = draw(mangled(written(draw(ANYTHING)))).decode(errors="replace")
    call = {
        **_CALL,
        "function": {"name": "f", "arguments": draw(st.just(arguments) | ANYTHING | st.sampled_from(_ARGUMENTS))},
    }
    chat = [{"role": "assistant", "content": None, "tool_calls": [call, draw(ANYTHING)][: draw(st.integers(1, 2))]}]
    return Request("POST", "/v1/chat/completions", written({"messages": chat, "chat_template_kwargs": {"x": 1}}))


@st.composite
def _anything(draw: st.DrawFn) -> Request:
    """Any path, some headers; a body of some other path's type, or any bytes."""
    struct, valid = draw(st.sampled_from(list(_TYPES.values())))
    body = draw(bodies(struct, valid) | ANYTHING.map(written) | st.binary(max_size=40))
    names = draw(st.lists(st.sampled_from(sorted(_HEADERS)), max_size=3, unique=True))
    headers = {name: draw(st.sampled_from(_HEADERS[name])).encode().decode("latin-1") for name in names}
    method = draw(st.sampled_from(["POST", "POST", "POST", "POST", "GET", "DELETE", "PUT", "OPTIONS", "HEAD"]))
    return Request(method, draw(st.sampled_from(_PATHS)), body, headers)


HTTP_TARGETS = [
    _post("/v1/chat/completions", cases=18),
    _post("/v1/completions", cases=12),
    _post("/tokenize", cases=6),
    _post("/detokenize", cases=4),
    _post("/api/v1/inference", cases=8),
    HttpTarget("serve tool calls", 8, _tool_chats(), running_server),
    HttpTarget("serve anything", 8, _anything(), running_server),
    _post("/v1/chat/completions", cases=10, place=running_gateway),
    _post("/api/v1/inference", cases=6, place=running_gateway),
    _post("/v1/messages", cases=8, place=running_gateway),
    _post("/v1/messages/count_tokens", cases=3, place=running_gateway),
    _post("/api/chat", cases=6, place=running_gateway),
    _post("/api/generate", cases=4, place=running_gateway),
    _post("/api/embed", cases=2, place=running_gateway),
    _post("/api/show", cases=2, place=running_gateway),
    _post("/admin/keys", cases=5, place=running_gateway),
    HttpTarget("gateway anything", 10, _anything(), running_gateway),
]
