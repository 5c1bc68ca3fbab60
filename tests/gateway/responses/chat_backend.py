"""A chat backend that says what a test tells it, whole or streamed in small pieces, and an `openai` client for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import openai

from tests.gateway.running_gateway import KEY, RunningGateway, Upstream, running_gateway
from tonle.edge.exchange import Exchange

PIECE_CHARS = 3
USAGE = {
    "prompt_tokens": 11,
    "completion_tokens": 5,
    "total_tokens": 16,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 2},
}


def call(name: str, arguments: str, call_id: str = "call_1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class ChatBackend(Upstream):
    """Answers with `messages`, one after the other; the last again and again."""

    def __init__(self, *messages: dict[str, Any], model: str = "m") -> None:
        super().__init__(model)
        self.messages = list(messages) or [{"content": "Phnom Penh."}]
        self.finish_reason = ""  # empty: by what is in the message
        self.logprobs: Any = None

    def _next(self) -> dict[str, Any]:
        return self.messages.pop(0) if len(self.messages) > 1 else self.messages[0]

    def _reason(self, message: dict[str, Any]) -> str:
        return self.finish_reason or ("tool_calls" if message.get("tool_calls") else "stop")

    def _whole(self, body: dict[str, Any]) -> dict[str, Any]:
        message = self._next()
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": None, **message},
            "finish_reason": self._reason(message),
            "logprobs": self.logprobs,
        }
        reply = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [choice],
            "usage": USAGE,
        }
        return reply | ({"warnings": self.warnings} if self.warnings else {})

    async def _stream(self, exchange: Exchange, body: dict[str, Any]) -> None:
        message = self._next()
        exchange.start(content_type="text/event-stream", headers=self._warning_headers())
        for index, chunk in enumerate(chat_chunks(message, self._reason(message), self.logprobs)):
            if index == self.pause_after:
                await self.resume.wait()
            if index == self.break_after:
                exchange._line.abort()  # type: ignore[attr-defined]
                return
            if index and self.stream_error:
                exchange.write(b"data: %b\n\n" % msgspec.json.encode({"error": {"message": self.stream_error}}))
                break
            told = {"warnings": self.warnings} if self.warnings and not index else {}
            exchange.write(b"data: %b\n\n" % msgspec.json.encode(chunk | {"model": body["model"]} | told))
            await asyncio.sleep(0)
        exchange.write(b"data: [DONE]\n\n")
        exchange.end()


def chat_chunks(message: dict[str, Any], reason: str, logprobs: Any = None) -> list[dict[str, Any]]:
    """As OpenAI-compatible servers cut a message."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for name in ("reasoning_content", "reasoning", "content", "refusal"):
        deltas += [{name: piece} for piece in _cut(message.get(name) or "")]
    for index, each in enumerate(message.get("tool_calls") or ()):
        function = each["function"]
        head = {
            "index": index,
            "id": each["id"],
            "type": "function",
            "function": {"name": function["name"], "arguments": ""},
        }
        deltas.append({"tool_calls": [head]})
        deltas += [
            {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
            for piece in _cut(function["arguments"])
        ]
    chunks: list[dict[str, Any]] = [
        {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "m",
            "choices": [
                {
                    "index": 0,
                    "delta": delta,
                    "finish_reason": None,
                    "logprobs": logprobs if delta.get("content") else None,
                }
            ],
        }
        for delta in deltas
    ]
    chunks[-1]["choices"][0]["finish_reason"] = reason
    return [*chunks, {**chunks[0], "choices": [], "usage": USAGE}]


def _cut(text: str) -> list[str]:
    return [text[start : start + PIECE_CHARS] for start in range(0, len(text), PIECE_CHARS)]


@contextlib.asynccontextmanager
async def responses_gateway(
    folder: Path, backend: Upstream, **settings: Any
) -> AsyncIterator[tuple[RunningGateway, openai.AsyncOpenAI]]:
    async with running_gateway(folder, backend, **settings) as place, client_of(place, KEY) as client:
        yield place, client


def client_of(place: RunningGateway, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{place.url}/v1", api_key=key, max_retries=0, timeout=120)
