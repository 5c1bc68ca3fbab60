"""Everything that is not generation: models, tokenize, health, metrics, version, docs.

Does: answer from what is known at once. Does not: cause work in the engine.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
from msgspec import UNSET

from tonle import __version__
from tonle.errors import InvalidRequest
from tonle.protocol.openai import (
    Detokenized,
    DetokenizeRequest,
    Health,
    ModelInfo,
    ModelList,
    TokenizeRequest,
    Tokens,
)
from tonle.protocol.parse import parse
from tonle.replica.catalog import openapi
from tonle.replica.conversation import template_messages
from tonle.replica.delivery import THREAD_BYTES
from tonle.replica.exchange import Exchange
from tonle.replica.page import docs_page
from tonle.replica.replica import Replica, warning_headers
from tonle.replica.served import Words


async def models(replica: Replica, exchange: Exchange) -> None:
    """503 until the model is there: some orchestrators use this as their readiness probe."""
    await _send(exchange, ModelList(data=[_model(replica, name) for name in replica.names]))


async def model(replica: Replica, exchange: Exchange) -> None:
    await _send(exchange, _model(replica, replica.resolve(exchange.scope["path_params"]["id"])))


def _model(replica: Replica, name: str) -> ModelInfo:
    front = replica.front
    return ModelInfo(id=name, created=front.created, root=front.name, max_model_len=replica.card().context_length)


async def tokenize(replica: Replica, exchange: Exchange) -> None:
    body = await exchange.body()
    request, warnings = parse(body, TokenizeRequest)
    replica.resolve(request.model)
    replica.check_strict(exchange, warnings)
    text, card = replica.front.text, replica.card()
    tokens = await asyncio.to_thread(_split, request, text) if len(body) > THREAD_BYTES else _split(request, text)
    reply = Tokens(tokens=tokens, count=len(tokens), max_model_len=card.context_length, warnings=warnings or UNSET)
    if request.return_token_strs:
        reply.token_strs = [text.token_text(token) for token in tokens]
    await _send(exchange, reply, headers=warning_headers(warnings))


def _split(request: TokenizeRequest, text: Words) -> list[int]:
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if request.messages is not None:
        return text.encode_chat(
            template_messages(request.messages),
            add_generation_prompt=request.add_generation_prompt is not False,
            extra=request.chat_template_kwargs,
        )
    return text.encode(request.prompt or "", add_special_tokens=request.add_special_tokens is not False)


async def detokenize(replica: Replica, exchange: Exchange) -> None:
    request, warnings = parse(await exchange.body(), DetokenizeRequest)
    replica.resolve(request.model)
    replica.check_strict(exchange, warnings)
    last = replica.card().vocab_size - 1
    if request.tokens and not 0 <= min(request.tokens) <= max(request.tokens) <= last:
        raise InvalidRequest(f"tokens: the model has tokens 0 to {last}", param="tokens")
    text = replica.front.text.decode(request.tokens, skip_special_tokens=bool(request.skip_special_tokens))
    await _send(exchange, Detokenized(prompt=text, warnings=warnings or UNSET), headers=warning_headers(warnings))


async def live(replica: Replica, exchange: Exchange) -> None:
    """The process answers; nothing about the engine."""
    await exchange.reply(b'{"status":"alive"}')


async def ready(replica: Replica, exchange: Exchange) -> None:
    reason = replica.why_not_ready()
    body = {"status": "ready"} if reason is None else {"status": "not ready", "reason": reason}
    await exchange.reply(msgspec.json.encode(body), status=200 if reason is None else 503)


async def health(replica: Replica, exchange: Exchange) -> None:
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
    await _send(exchange, body, status=200 if reason is None else 503)


async def metrics(replica: Replica, exchange: Exchange) -> None:
    body, content_type = replica.metrics.render(exchange.header("accept"))
    await exchange.reply(body, content_type=content_type)


async def version(replica: Replica, exchange: Exchange) -> None:
    await exchange.reply(msgspec.json.encode({"version": __version__}))


async def openapi_json(replica: Replica, exchange: Exchange) -> None:
    await exchange.reply(msgspec.json.encode(openapi()))


async def docs(replica: Replica, exchange: Exchange) -> None:
    host = exchange.header("host") or "localhost:8000"
    page = docs_page(replica.front.name, f"{exchange.scope.get('scheme', 'http')}://{host}")
    await exchange.reply(page.encode(), content_type="text/html; charset=utf-8")


async def _send(
    exchange: Exchange, body: msgspec.Struct, *, status: int = 200, headers: list[tuple[str, str]] | None = None
) -> None:
    await exchange.reply(msgspec.json.encode(body), status=status, headers=headers or ())
