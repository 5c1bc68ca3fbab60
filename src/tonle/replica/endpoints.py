"""Everything that is not generation: models, tokenize, health, docs.

Does: answer from what is known at once. Does not: cause work in the engine, or send: each returns a `EndpointReply`.
"""

from __future__ import annotations

import asyncio
import functools
import time
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from tonle.engine.text import Text
from tonle.errors import InvalidRequest, NotFound
from tonle.gateway.backends.transport import SHOW_PATHS_HEADER, TRUST_SALT_HEADER
from tonle.protocol.adapters import PLAIN_TEXT
from tonle.protocol.openai import (
    ChatRequest,
    Detokenized,
    DetokenizeRequest,
    Health,
    ModelInfo,
    ModelList,
    TokenizeRequest,
    Tokens,
)
from tonle.protocol.parse import parse, warning_headers
from tonle.replica.api_catalog import openapi
from tonle.replica.chat_prompt import chat_prompt
from tonle.replica.chat_style import ChatStyle
from tonle.replica.docs_page import docs_page
from tonle.replica.generate import THREAD_BYTES
from tonle.replica.read_thinking import read_thinking
from tonle.replica.read_tools import read_tools
from tonle.replica.replica import Replica, ReplicaRequest

# A conversation at /tokenize is read as the chat it would be.
_OF_CHAT = [name for name in TokenizeRequest.__struct_fields__ if name in ChatRequest.__struct_fields__]


@dataclass(frozen=True, slots=True)
class EndpointReply:
    body: bytes
    status: int = 200
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


def text_reply(text: str, *, headers: dict[str, str] | None = None) -> EndpointReply:
    return EndpointReply(text.encode(), content_type=PLAIN_TEXT, headers=headers or {})


def _json(body: object, *, status: int = 200, headers: dict[str, str] | None = None) -> EndpointReply:
    return EndpointReply(msgspec.json.encode(body), status=status, headers=headers or {})


async def models(replica: Replica, request: ReplicaRequest) -> EndpointReply:
    """503 until the model is there: some orchestrators use this as their readiness probe."""
    headers = {TRUST_SALT_HEADER: "1"} if replica.options.trust_salt else {}
    return _json(ModelList(data=[_model(replica, request, name) for name in replica.entries()]), headers=headers)


async def model(replica: Replica, request: ReplicaRequest) -> EndpointReply:
    return _json(_model(replica, request, replica.resolve(request.path.removeprefix("/v1/models/"))))


def _model(replica: Replica, request: ReplicaRequest, name: str) -> ModelInfo:
    front, context_length = replica.front, replica.card().context_length
    if replica.adapter(name) is None:
        return ModelInfo(id=name, created=front.created, root=front.name, max_model_len=context_length)
    info = front.adapters.get(name) or front.awaited_adapters[name]
    return ModelInfo(
        id=name, created=front.created, root=info.path if request.header(SHOW_PATHS_HEADER) else front.name,
        parent=front.name, max_model_len=context_length, digest=info.digest,
    )  # fmt: skip


async def tokenize(replica: Replica, request: ReplicaRequest) -> EndpointReply:
    asked, warnings = parse(request.body, TokenizeRequest)
    replica.resolve(asked.model)
    replica.check_strict(request, warnings)
    text, card = replica.front.text, replica.card()
    split = functools.partial(_split, asked, text, replica.chat_style)
    tokens, texts = await asyncio.to_thread(split) if len(request.body) > THREAD_BYTES else split()
    reply = Tokens(tokens=tokens, count=len(tokens), max_model_len=card.context_length, warnings=warnings or UNSET)
    reply.token_strs = texts
    return _json(reply, headers=warning_headers(warnings))


def _split(asked: TokenizeRequest, text: Text, style: ChatStyle) -> tuple[list[int], list[str] | UnsetType]:
    """The tokens, and each as text if the caller asked for that."""
    tokens = _tokens(asked, text, style)
    return tokens, [text.token_text(token) for token in tokens] if asked.return_token_strs else UNSET


def _tokens(asked: TokenizeRequest, text: Text, style: ChatStyle) -> list[int]:
    if (asked.prompt is None) == (asked.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if asked.messages is not None:
        chat = ChatRequest(**{name: getattr(asked, name) for name in _OF_CHAT})
        use = read_tools(chat)
        return chat_prompt(chat, chat.messages, use.tools if use else [], text, style, read_thinking(chat).variables)
    return text.encode(asked.prompt or "", add_special_tokens=asked.add_special_tokens is not False)


async def detokenize(replica: Replica, request: ReplicaRequest) -> EndpointReply:
    asked, warnings = parse(request.body, DetokenizeRequest)
    replica.resolve(asked.model)
    replica.check_strict(request, warnings)
    last = replica.card().vocab_size - 1
    if asked.tokens and not 0 <= min(asked.tokens) <= max(asked.tokens) <= last:
        raise InvalidRequest(f"tokens: the model has tokens 0 to {last}", param="tokens")
    decode = functools.partial(
        replica.front.text.decode, asked.tokens, skip_special_tokens=bool(asked.skip_special_tokens)
    )
    text = await asyncio.to_thread(decode) if len(request.body) > THREAD_BYTES else decode()
    return _json(Detokenized(prompt=text, warnings=warnings or UNSET), headers=warning_headers(warnings))


async def ready(replica: Replica, request: ReplicaRequest) -> EndpointReply:
    reason = replica.why_not_ready()
    if reason is None:
        return _json({"status": "ready"})
    return _json({"status": "not ready", "reason": reason}, status=503)


async def health(replica: Replica, request: ReplicaRequest) -> EndpointReply:
    reason, stats = replica.why_not_ready(), replica.front.stats
    body = Health(
        status="healthy" if reason is None else "unhealthy",
        reason=reason,
        model=replica.front.name,
        running=stats.num_running,
        waiting=stats.num_waiting,
        kv_usage=stats.kv_usage,
        uptime_s=round(time.monotonic() - replica.started_s, 3),
    )
    return _json(body, status=200 if reason is None else 503)


async def openapi_json(replica: Replica, request: ReplicaRequest) -> EndpointReply:
    return _json(openapi())


async def docs(replica: Replica, request: ReplicaRequest) -> EndpointReply:
    base_url = f"{request.header('x-forwarded-proto') or 'http'}://{request.header('host') or 'localhost:8000'}"
    return EndpointReply(docs_page(replica.front.name, base_url).encode(), content_type="text/html; charset=utf-8")


async def not_supported(replica: Replica, request: ReplicaRequest) -> EndpointReply:
    raise NotFound(f"{request.path} is not supported yet. GET /docs lists what there is.")
