"""The inference service: one question in, one answer and its facts out; a thin layer over chat.

    POST /api/v1/inference  {"user_input": "…", "conversation_history": [{"role": …, "content": …}], "use_cache": true}
    → {"response": "…", "metadata": {"latency": 0.8, "cache_hit": false, "prompt_tokens": …, …}}

Does: turn the question into a chat request, cut old history, reshape the answer, whole or streamed. Does not: answer;
the pipeline does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tonle.edge.exchange import JSON, Exchange
from tonle.gateway.apis.chat_stream import ChatChunks, first_choice, whole_answer
from tonle.gateway.call import Call, Outlet, ReplyFacts
from tonle.gateway.parsed_request import DecodedBody, ParsedRequest, add_warning, estimate_tokens
from tonle.protocol import sse
from tonle.protocol.history import recent
from tonle.protocol.openai import FieldWarning, about
from tonle.protocol.parse import parse

CHAT = "/v1/chat/completions"


class Message(msgspec.Struct):
    role: str
    content: str


class InferenceRequest(msgspec.Struct, kw_only=True):
    user_input: Annotated[str, about("The question.")]
    conversation_history: Annotated[list[Message], about("Earlier messages, oldest first.")] = []
    use_cache: Annotated[bool, about("Answer from the response cache if possible. Default true.")] = True
    stream: Annotated[bool, about("Send the answer as server-sent events as it is generated.")] = False
    system_prompt: Annotated[str | None, about("Placed before the history.")] = None
    model: Annotated[str | None, about("Name of the model; may be left out if there is only one.")] = None
    max_tokens: Annotated[int | None, about("Most new tokens. Default: the server's.")] = None
    temperature: Annotated[float, about("0 = always the most likely token. Default 0.")] = 0.0
    top_p: Annotated[float | None, about("Keep the likeliest tokens up to this total probability.")] = None
    seed: Annotated[int | None, about("Same seed, same draws.")] = None
    user: Annotated[str | None, about("Who asks; keeps a user in one arm of an experiment.")] = None
    max_context_length: Annotated[
        Annotated[int, Meta(ge=1)] | None, about("Most tokens of history (estimated), up to the server's own limit.")
    ] = None
    context_window: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        about("Most messages of history, in whole turns, up to the server's own limit."),
    ] = None


class InferenceCall(Call):
    """A call whose body is read as an `InferenceRequest`, and answered in the service's own shape."""

    __slots__ = ("_max_tokens", "_window")

    def __init__(self, exchange: Exchange, *, context_window: int | None, max_context_length: int | None) -> None:
        super().__init__(exchange, CHAT)
        self._window = context_window
        self._max_tokens = max_context_length

    def decode(self) -> DecodedBody:
        request, warnings = parse(self.exchange.body, InferenceRequest)
        window = _least(warnings, "context_window", self._window, request.context_window)
        max_tokens = _least(warnings, "max_context_length", self._max_tokens, request.max_context_length)
        system = [Message("system", request.system_prompt)] if request.system_prompt else []
        question = Message("user", request.user_input)
        always = [*system, question]
        history = kept_history(request.conversation_history, always, window=window, max_tokens=max_tokens)
        body = _chat_body(request, [*system, *history, question])
        dropped = len(request.conversation_history) - len(history)
        return DecodedBody(body, msgspec.json.encode(body), warnings, history_dropped=dropped)

    def outlet(self, request: ParsedRequest | None, facts: ReplyFacts) -> Outlet:
        return self.exchange if request is None else WrappedReply(self.exchange, request, facts)


def _chat_body(request: InferenceRequest, messages: list[Message]) -> dict[str, Any]:
    body: dict[str, Any] = {
        "messages": [{"role": message.role, "content": message.content} for message in messages],
        "temperature": request.temperature,
        "use_cache": request.use_cache,
    }
    for name in ("model", "max_tokens", "top_p", "seed", "user"):
        if getattr(request, name) is not None:
            body[name] = getattr(request, name)
    if request.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}  # the metadata has it
    return body


def _least(warnings: list[FieldWarning], name: str, ours: int | None, theirs: int | None) -> int | None:
    if ours is not None and theirs is not None and theirs > ours:
        add_warning(warnings, name, f"changed to {ours}, the most this gateway allows")
    return min((value for value in (ours, theirs) if value is not None), default=None)


def kept_history(
    history: list[Message], always: list[Message], *, window: int | None, max_tokens: int | None
) -> list[Message]:
    """The newest turns, whole, that fit beside the messages always sent, by estimate; a system message at the beginning stays."""
    always_tokens = _estimate(always)

    def fits(kept: list[Message]) -> bool:
        return max_tokens is None or always_tokens + _estimate(kept) <= max_tokens

    return recent(history, role=lambda message: message.role, window=window, fits=fits).messages


def _estimate(messages: list[Message]) -> int:
    return sum(estimate_tokens(message.content) for message in messages)


class WrappedReply:
    """Turns a chat answer, whole or streamed, into the service's own shape; errors pass as they are."""

    def __init__(self, exchange: Exchange, request: ParsedRequest, facts: ReplyFacts) -> None:
        self._exchange = exchange
        self._request = request
        self._facts = facts
        self._chunks = ChatChunks()
        self._chat: dict[str, Any] = {}  # what the chunks of a stream said beside their text
        self._finish_reason: str | None = None

    def reply(
        self, body: bytes, *, status: int = 200, content_type: str = JSON, headers: Iterable[tuple[str, str]] = ()
    ) -> None:
        if status == 200:
            answer, choice = whole_answer(body)
            metadata = self._metadata(answer, choice.get("finish_reason"))
            headers = list(headers)
            engine_s = sum(_seconds(value) for name, value in headers if name == "x-queue-time")
            metadata["queue_time"] = round(self._facts.queued_s + engine_s, 6)
            body = msgspec.json.encode({"response": choice["message"].get("content"), "metadata": metadata})
        self._exchange.reply(body, status=status, content_type=content_type, headers=headers)

    # -- streams

    def start(self, *, status: int = 200, content_type: str, headers: Iterable[tuple[str, str]] = ()) -> None:
        self._exchange.start(status=status, content_type=content_type, headers=headers)

    def write(self, piece: bytes) -> None:
        self._exchange.write(b"".join([self._wrapped(chunk) for chunk in self._chunks.feed(piece)]))

    def end(self) -> None:
        """A stream that did not fail ends with the metadata."""
        last = b"".join([self._wrapped(chunk) for chunk in self._chunks.finish()])
        if not self._chunks.failed:
            metadata = self._metadata(self._chat, self._finish_reason)
            last += _event({"response": "", "metadata": metadata}) + sse.DONE
        self._exchange.write(last)
        self._exchange.end()

    def _wrapped(self, chunk: dict[str, Any]) -> bytes:
        """A chunk's text in the service's shape; a comment or an error as it is; nothing for what has no text."""
        if "comment" in chunk:
            return f": {chunk['comment']}\n\n".encode()
        if chunk.get("error") is not None:
            return _event(chunk)
        self._chat |= {name: chunk[name] for name in ("model", "usage", "warnings") if chunk.get(name)}
        choice = first_choice(chunk)
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        delta = choice.get("delta")
        text = delta.get("content") if isinstance(delta, dict) else None
        return _event({"response": text}) if text else b""

    def _metadata(self, chat: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        usage, facts = chat.get("usage"), self._facts
        usage = usage if isinstance(usage, dict) else {}
        metadata = {
            "latency": round(self._exchange.elapsed_s, 6),
            "cache_hit": facts.cache_state == "hit",
            "model": chat.get("model"),
            "prompt_tokens": usage.get("prompt_tokens"),
            "completion_tokens": usage.get("completion_tokens"),
            "total_tokens": usage.get("total_tokens"),
            "finish_reason": finish_reason,
            "queue_time": round(facts.queued_s, 6),
            "history_messages_dropped": self._request.history_dropped,
            "request_id": self._exchange.request_id,
            "backend": facts.backend or None,
        }
        if warnings := chat.get("warnings"):
            metadata["warnings"] = warnings
        return metadata


def _seconds(text: str) -> float:
    """Of a backend's header; 0 if that is no number."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0


def _event(body: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(body)
