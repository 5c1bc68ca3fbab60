"""`RemoteBackend`: any OpenAI-compatible server, over HTTP."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from http import HTTPStatus
from typing import Any

import msgspec

from tonle.cli.backends import AnswerOptions, AnswerStats, Prompt
from tonle.cli.remote_server import RemoteServer
from tonle.edge.streamed_reply import StreamedReply
from tonle.errors import CallerError, ContextOverflow, InternalError
from tonle.protocol.replies import (
    EventReader,
    ModelEntry,
    Reply,
    body_message,
    content_text,
    decode_reply,
    error_text,
    read_models,
)
from tonle.protocol.sse import MEDIA_TYPE

_LIST_TIMEOUT_S = 60.0  # for /v1/models


class RemoteBackend:
    def __init__(self, url: str, *, model: str | None = None, api_key: str | None = None) -> None:
        """`url` with or without /v1. `model` None: the first one the server lists."""
        self._model = model
        self._server = RemoteServer(url, api_key=api_key)
        self._context_length: int | None = None  # if the server says

    @property
    def name(self) -> str:
        return self._model or str(self._server.address)

    async def start(self) -> None:
        """Ask which models there are, to learn that the server is there and what to call the model."""
        listed = await self._list_models()
        if not listed:
            raise CallerError(f"{self._server.address} lists no model")
        if self._model is not None and self._model not in listed:
            raise CallerError(f"{self._server.address} has no model {self._model!r}; it has {', '.join(listed)}")
        self._model = self._model or next(iter(listed))
        self._context_length = listed[self._model].max_model_len

    async def _list_models(self) -> dict[str, ModelEntry]:
        reply = await self._server.get("/v1/models", timeout_s=_LIST_TIMEOUT_S)
        if reply.status == HTTPStatus.NOT_FOUND:
            raise self._server.not_openai("it has no /v1/models")
        if reply.status != HTTPStatus.OK:
            raise self._server.refusal(reply, reply.body)
        try:
            return {entry.id: entry for entry in read_models(reply.body)}
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._server.not_openai(f"its list of models cannot be read ({error})") from error

    async def close(self) -> None:
        self._server.close()

    async def answer(self, prompt: Prompt, options: AnswerOptions, stats: AnswerStats) -> AsyncGenerator[str, None]:
        path, body = self._request(prompt, options)
        stats.max_tokens = body.get("max_tokens")
        stats.asked_s = time.monotonic()
        stats.context_length = self._context_length
        async with self._server.stream(path, body) as reply, contextlib.aclosing(self._events(reply)) as events:
            if reply.status != HTTPStatus.OK:
                await self._refuse(reply)
            told = reply.headers.get("x-tonle-max-tokens", "")
            stats.max_tokens = int(told) if told.isdecimal() else options.max_tokens
            async for event in events:
                if text := _take(event, stats):
                    yield text
        if stats.finish_reason is None:
            raise InternalError(f"{self._server.address} ended its answer before it was complete")

    def _request(self, prompt: Prompt, options: AnswerOptions) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}}
        given = {
            "temperature": options.temperature,
            "top_p": options.top_p,
            "max_tokens": self._max_tokens(options.max_tokens),
            "seed": options.seed,
        }
        body |= {name: value for name, value in given.items() if value is not None}
        if isinstance(prompt, str):
            return "/v1/completions", body | {"prompt": prompt}
        return "/v1/chat/completions", body | {"messages": prompt}

    def _max_tokens(self, wanted: int | None) -> int | None:
        """A server refuses a prompt that leaves less room than this: ask for no more than the prompt can spare."""
        if self._context_length is None or wanted is None:
            return wanted
        return min(wanted, self._context_length // 2)

    async def _refuse(self, reply: StreamedReply) -> None:
        """Raises the error that the server answered with."""
        body = await reply.read()
        message = body_message(body)
        if "context length" in message or _error_code(body) == ContextOverflow.code:
            raise ContextOverflow(message)
        raise self._server.refusal(reply, body)

    async def _events(self, reply: StreamedReply) -> AsyncGenerator[Reply, None]:
        """The events of a stream, or the whole answer of a server that does not stream."""
        if not reply.content_type.lower().startswith(MEDIA_TYPE):
            yield self._whole(await reply.read())
            return
        reader = EventReader()
        async for piece in reply:
            for event in reader.feed(piece):
                yield event
            if reader.problem is not None:
                raise self._server.not_openai(f"a part of its answer cannot be read ({reader.problem})")
            if reader.done:
                return
        for event in reader.finish():
            yield event

    def _whole(self, body: bytes) -> Reply:
        try:
            reply = decode_reply(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._server.not_openai(f"its answer cannot be read ({error})") from error
        if reply.choices is None and reply.error is None:
            raise self._server.not_openai("its answer has no choices")
        return reply


def _error_code(body: bytes) -> Any:
    try:
        error = decode_reply(body).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return error.get("code") if isinstance(error, dict) else None


def _take(event: Reply, stats: AnswerStats) -> str:
    """Count what an event brings, and return its text."""
    if event.error is not None:
        raise InternalError(f"the server reported an error: {error_text(event.error)}")
    text = ""
    for choice in event.choices or ():
        said = choice.delta or choice.message
        text += (content_text(said.content) if said is not None and said.content else choice.text) or ""
        stats.finish_reason = choice.finish_reason or stats.finish_reason
    if text:
        stats.last_s = time.monotonic()
        stats.first_s = stats.first_s or stats.last_s
        stats.completion_tokens += 1
        stats.exact = False
    if usage := event.usage:
        stats.prompt_tokens = usage.get("prompt_tokens") or 0
        stats.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        stats.completion_tokens = usage.get("completion_tokens") or stats.completion_tokens
        stats.exact = True
    return text
