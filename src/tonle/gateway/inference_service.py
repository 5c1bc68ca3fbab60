"""The inference service: one question in, one answer and its facts out. A thin coat over chat.

    POST /api/v1/inference  {"user_input": "…", "conversation_history": [{"role": …, "content": …}], "use_cache": true}
    → {"response": "…", "metadata": {"latency": 0.8, "cache_hit": false, "prompt_tokens": …, …}}

Does: turn it into a chat request, cut old history, wrap the answer. Does not: answer; the pipeline does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tonle.edge.exchange import JSON, Exchange
from tonle.gateway.call import Call, estimate_tokens
from tonle.protocol.parse import parse

CHAT = "/v1/chat/completions"


class Turn(msgspec.Struct):
    role: str
    content: str


class InferenceRequest(msgspec.Struct, kw_only=True):
    user_input: str
    conversation_history: list[Turn] = []
    use_cache: bool = True
    system_prompt: str | None = None
    model: str | None = None
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float | None = None
    seed: int | None = None
    user: str | None = None
    max_context_length: Annotated[int, Meta(ge=1)] | None = None  # tokens, estimated; at most the gateway's own
    context_window: Annotated[int, Meta(ge=1)] | None = None  # messages


class InferenceCall(Call):
    """A call whose body is read as an `InferenceRequest`."""

    def __init__(self, exchange: Exchange, *, context_window: int | None, max_context_length: int | None) -> None:
        super().__init__(exchange, CHAT)
        self._window = context_window
        self._max_tokens = max_context_length
        self.num_dropped = 0  # messages of the history that were left out

    def _decode(self) -> dict[str, Any]:
        request, warnings = parse(self.raw, InferenceRequest)
        self.warnings += warnings
        self.raw = msgspec.json.encode(self._chat(request))
        return super()._decode()

    def _chat(self, request: InferenceRequest) -> dict[str, Any]:
        window = self._least("context_window", self._window, request.context_window)
        max_tokens = self._least("max_context_length", self._max_tokens, request.max_context_length)
        system = [Turn("system", request.system_prompt)] if request.system_prompt else []
        question = Turn("user", request.user_input)
        history = recent(request.conversation_history, [*system, question], window=window, max_tokens=max_tokens)
        self.num_dropped = len(request.conversation_history) - len(history)
        body: dict[str, Any] = {
            "messages": [{"role": turn.role, "content": turn.content} for turn in (*system, *history, question)],
            "temperature": request.temperature,
            "use_cache": request.use_cache,
        }
        for name in ("model", "max_tokens", "top_p", "seed", "user"):
            if getattr(request, name) is not None:
                body[name] = getattr(request, name)
        return body

    def _least(self, name: str, ours: int | None, theirs: int | None) -> int | None:
        if ours is not None and theirs is not None and theirs > ours:
            self.warn(name, f"changed to {ours}, the most this gateway allows")
        return min((value for value in (ours, theirs) if value is not None), default=None)


def recent(history: list[Turn], always: list[Turn], *, window: int | None, max_tokens: int | None) -> list[Turn]:
    """The newest messages that fit beside those always sent; a system message at the beginning stays."""
    first = history[:1] if history and history[0].role == "system" else []
    rest = history[len(first) :]
    if window is not None:
        rest = rest[-window:]
    if max_tokens is not None:
        left = max_tokens - sum(estimate_tokens(turn.content) for turn in (*always, *first))
        kept: list[Turn] = []
        for turn in reversed(rest):
            left -= estimate_tokens(turn.content)
            if left < 0:
                break
            kept.append(turn)
        rest = kept[::-1]
    return [*first, *rest]


class WrappedReply:
    """An outlet that turns a chat answer into the service's own shape; errors pass as they are."""

    def __init__(self, call: InferenceCall) -> None:
        self._call = call

    def reply(
        self, body: bytes, *, status: int = 200, content_type: str = JSON, headers: Iterable[tuple[str, str]] = ()
    ) -> None:
        if status == 200:
            body = self._wrap(body)
        self._call.exchange.reply(body, status=status, content_type=content_type, headers=headers)

    def start(self, *, status: int = 200, content_type: str, headers: Iterable[tuple[str, str]] = ()) -> None:
        raise AssertionError("answers of this service are whole")

    def write(self, piece: bytes) -> None:
        raise AssertionError("answers of this service are whole")

    def end(self) -> None:
        raise AssertionError("answers of this service are whole")

    def _wrap(self, body: bytes) -> bytes:
        call, answer = self._call, msgspec.json.decode(body)
        choice, usage = answer["choices"][0], answer.get("usage") or {}
        metadata = {
            "latency": round(call.exchange.elapsed_s, 6),
            "cache_hit": call.cache_state == "hit",
            "model": answer.get("model"),
            "prompt_tokens": usage.get("prompt_tokens"),
            "completion_tokens": usage.get("completion_tokens"),
            "total_tokens": usage.get("total_tokens"),
            "finish_reason": choice.get("finish_reason"),
            "queue_time": round(call.queued_s, 6),
            "history_messages_dropped": call.num_dropped,
            "request_id": call.request_id,
            "backend": call.backend or None,
        }
        if warnings := answer.get("warnings"):
            metadata["warnings"] = warnings
        return msgspec.json.encode({"response": choice["message"]["content"], "metadata": metadata})
