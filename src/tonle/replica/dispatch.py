"""The replica as a backend of the gateway's pipeline, in the same process: no socket, no second parse.

Does: find the endpoint for a path, hand its reply to a sink, turn errors into replies. Does not: know HTTP, keys or
records; the gateway in front of it does.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from tonle.edge.client import Sink, UpstreamError
from tonle.engine.text import Text
from tonle.errors import TonleError
from tonle.gateway.backends.transport import SALT_HEADER
from tonle.observe.trace_context import TraceContext
from tonle.protocol.adapters import LOAD_PATH, UNLOAD_PATH
from tonle.protocol.embeddings import RERANK_PATHS, SCORE_PATHS
from tonle.protocol.errors import error_reply
from tonle.protocol.openai import ChatRequest, CompletionRequest
from tonle.replica import adapter_endpoints, endpoints
from tonle.replica.answer_parts import AnswerFormat
from tonle.replica.chat_answer import ChatAnswer
from tonle.replica.completion_answer import CompletionAnswer
from tonle.replica.embeddings import embeddings
from tonle.replica.endpoints import EndpointReply
from tonle.replica.generate import EndpointKind, Envelope, generate
from tonle.replica.parsed_answer import ParsedChatAnswer
from tonle.replica.replica import Replica, ReplicaRequest
from tonle.replica.scoring import rerank, score
from tonle.replica.submission import Submission
from tonle.replica.translate import chat_order, completion_order

log = logging.getLogger("tonle.replica")

Endpoint = Callable[[Replica, ReplicaRequest], Awaitable[EndpointReply]]


def _chat_answer(request: ChatRequest, envelope: Envelope, submission: Submission, text: Text) -> AnswerFormat:
    if (reading := submission.order.reading) is None:
        return ChatAnswer(request, envelope, submission, text)
    return ParsedChatAnswer(request, envelope, submission, text, reading)


CHAT = EndpointKind(ChatRequest, chat_order, _chat_answer, id_prefix="chatcmpl")
COMPLETION = EndpointKind(CompletionRequest, completion_order, CompletionAnswer, id_prefix="cmpl")
GENERATING = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}

# They have the engine compute, and reply as a whole.
COMPUTING: dict[str, Endpoint] = {
    "/v1/embeddings": embeddings,
    **dict.fromkeys(SCORE_PATHS, score),
    **dict.fromkeys(RERANK_PATHS, rerank),
}

ENDPOINTS: dict[tuple[str, str], Endpoint] = {
    ("POST", "/tokenize"): endpoints.tokenize,
    ("POST", "/detokenize"): endpoints.detokenize,
    ("POST", LOAD_PATH): adapter_endpoints.load_adapter,
    ("POST", UNLOAD_PATH): adapter_endpoints.unload_adapter,
    ("GET", "/v1/models"): endpoints.models,
    ("GET", "/health"): endpoints.health,
    ("GET", "/health/ready"): endpoints.ready,
    ("GET", "/docs"): endpoints.docs,
    ("GET", "/openapi.json"): endpoints.openapi_json,
}


class ReplicaTransport:
    """A `Transport` (gateway/backends/transport.py)."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    async def send(
        self, method: str, path: str, body: bytes, headers: dict[str, str], sink: Sink, *, first_s: float,
        silence_s: float,
    ) -> None:  # fmt: skip
        names = {name.lower(): value for name, value in headers.items()}
        request = ReplicaRequest(
            method=method, path=path, body=body, headers=names, salt=names.get(SALT_HEADER, "").encode("latin-1")
        )
        try:
            if method == "POST" and (kind := GENERATING.get(path)) is not None:
                await generate(self._replica, request, kind, sink, first_s=first_s)
                return
            if method == "POST" and (endpoint := COMPUTING.get(path)) is not None:
                sink.attach(_no_pressure)  # from here on it costs something
                reply = await _within(first_s, endpoint(self._replica, request))
            else:
                reply = await self._endpoint(method, path)(self._replica, request)
        except UpstreamError:  # too late: the gateway knows the request's deadline
            raise
        except TonleError as error:
            reply = _error(error)
        except Exception as error:
            log.exception("%s %s failed, id %s", method, path, request.header("x-request-id"), extra=_about(names))
            reply = _error(error)
        sink.head(reply.status, {"content-type": reply.content_type, **reply.headers})
        sink.data(reply.body)

    def _endpoint(self, method: str, path: str) -> Endpoint:
        if path.startswith("/v1/models/"):
            return endpoints.model
        return ENDPOINTS.get((method, path)) or endpoints.not_supported

    def close(self) -> None:
        """Nothing is held."""


def _no_pressure(is_full: bool) -> None:
    """The reply comes in one piece: there is nothing to hold back."""


def _about(headers: dict[str, str]) -> dict[str, Any]:
    """Which request a log line is about, for lines as JSON."""
    trace = TraceContext.of(headers)
    trace_id = {} if trace is None else {"trace_id": trace.trace_id}
    return {"fields": {"request_id": headers.get("x-request-id", ""), **trace_id}}


async def _within(first_s: float, reply: Awaitable[EndpointReply]) -> EndpointReply:
    try:
        async with asyncio.timeout(first_s if math.isfinite(first_s) else None):
            return await reply
    except TimeoutError:
        raise UpstreamError("timeout", f"nothing came for {first_s:g} s") from None


def _error(error: BaseException) -> EndpointReply:
    found = error_reply(error)
    return EndpointReply(msgspec.json.encode(found.body), status=found.status, headers=dict(found.headers))
