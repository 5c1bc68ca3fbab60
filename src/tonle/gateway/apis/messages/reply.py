"""A chat answer as a message of Anthropic's API, whole or as events.

Does: write content blocks, stop reason and usage; errors in Anthropic's shape. Does not: read bytes of a stream
(`../chat_stream.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from tonle.edge.exchange import JSON, Exchange
from tonle.gateway.apis.chat_answers import calls_of, text_of, thoughts_of, whole_calls
from tonle.gateway.apis.chat_stream import ChatChunks, decoded, whole_answer
from tonle.gateway.apis.error_shapes import own_shape
from tonle.gateway.apis.messages.events import MessageEvents, stop_facts, usage_fields
from tonle.gateway.refusals import UpstreamFailed
from tonle.protocol import sse


class MessagesReply:
    """An `Outlet`: what a backend answers to the chat request comes in, a message goes out."""

    def __init__(self, exchange: Exchange, message_id: str, model: str) -> None:
        """`model`: as the caller named it."""
        self._exchange = exchange
        self._message_id = message_id
        self._chunks = ChatChunks()
        self._events = MessageEvents(exchange.request_id, message_id, model)

    def reply(
        self, body: bytes, *, status: int = 200, content_type: str = JSON, headers: Iterable[tuple[str, str]] = ()
    ) -> None:
        if status == 200:
            body = msgspec.json.encode(whole_message(body, self._message_id))
        else:
            body = own_shape(self._exchange.path, status, body, self._exchange.request_id)
        self._exchange.reply(body, status=status, headers=headers)

    def start(self, *, status: int = 200, content_type: str, headers: Iterable[tuple[str, str]] = ()) -> None:
        self._exchange.start(status=status, content_type=sse.CONTENT_TYPE, headers=headers)

    def write(self, piece: bytes) -> None:
        self._exchange.write(b"".join([self._events.of_chunk(chunk) for chunk in self._chunks.feed(piece)]))

    def end(self) -> None:
        """Raises `UpstreamFailed` if what came is no whole answer; the error is then written, and this is called again."""
        self._exchange.write(b"".join([self._events.of_chunk(chunk) for chunk in self._chunks.finish()]))
        if (problem := self._events.problem()) is not None:
            raise UpstreamFailed(problem)
        self._exchange.write(self._events.last())
        self._exchange.end()


class CountReply(MessagesReply):
    """What a backend answers to /tokenize comes in, a number of tokens goes out."""

    def reply(
        self, body: bytes, *, status: int = 200, content_type: str = JSON, headers: Iterable[tuple[str, str]] = ()
    ) -> None:
        if status != 200:
            super().reply(body, status=status, headers=headers)
            return
        found = decoded(body)
        count = found.get("count") if isinstance(found, dict) else None
        if not isinstance(found, dict) or not isinstance(count, int):
            raise UpstreamFailed("the backend does not say how many tokens there are")
        told = {"input_tokens": count} | ({"warnings": found["warnings"]} if found.get("warnings") else {})
        self._exchange.reply(msgspec.json.encode(told), headers=headers)


def whole_message(body: bytes, message_id: str) -> dict[str, Any]:
    """Raises `UpstreamFailed`."""
    answer, choice = whole_answer(body)
    message, finish = choice["message"], choice.get("finish_reason")
    content: list[dict[str, Any]] = []
    if thoughts := thoughts_of(message):
        content.append({"type": "thinking", "thinking": thoughts, "signature": message_id})
    if text := text_of(message):
        content.append({"type": "text", "text": text})
    calls = whole_calls(calls_of(message), cut_off=finish == "length")
    content += [{"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in calls]
    stop_reason, stop_sequence = stop_facts(finish, choice.get("stop_reason"), has_calls=bool(calls))
    told = {
        "id": message_id, "type": "message", "role": "assistant", "model": answer.get("model"), "content": content,
        "stop_reason": stop_reason, "stop_sequence": stop_sequence, "usage": usage_fields(answer.get("usage")),
    }  # fmt: skip
    return told | ({"warnings": answer["warnings"]} if answer.get("warnings") else {})
