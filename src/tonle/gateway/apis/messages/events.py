"""The events of a streamed message in Anthropic's API, made of chat chunks.

    message_start, then for each block content_block_start, content_block_delta …, content_block_stop, then
    message_delta, message_stop; ping while nothing comes; error in place of the rest

Does: keep track of the block that is open, name reasons to stop and usage as that API does. Does not: send. A backend
may send anything: nothing here raises.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tonle.gateway.apis.chat_answers import calls_of, place_of, string_in, text_of, thoughts_of, token_counts
from tonle.gateway.apis.chat_stream import first_choice
from tonle.gateway.apis.error_shapes import messages_event

_STOP_REASONS = {
    "length": "max_tokens", "tool_calls": "tool_use", "function_call": "tool_use", "content_filter": "refusal",
}  # fmt: skip
_BROKE_OFF = "the answer of the backend broke off"
_MIXED = "the backend mixed the pieces of its tool calls"
_NAMELESS = "the backend made a tool call without a name"
TEXT, THINKING = "text", "thinking"


def stop_facts(finish_reason: Any, stop_reason: Any, *, has_calls: bool) -> tuple[str, str | None]:
    """`stop_reason` and `stop_sequence`. Servers tell the string that matched as a choice's `stop_reason`, some of them."""
    if finish_reason == "stop" and has_calls:  # some say so of calls that the request asked for
        return "tool_use", None
    if finish_reason == "stop" and isinstance(stop_reason, str):
        return "stop_sequence", stop_reason
    return _STOP_REASONS.get(finish_reason, "end_turn"), None


def usage_fields(usage: Any) -> dict[str, int]:
    """Tokens of the prompt that were cached count apart."""
    counts = token_counts(usage)
    return {
        "input_tokens": max(counts.prompt - counts.cached, 0), "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached, "output_tokens": counts.completion,
    }  # fmt: skip


class MessageEvents:
    def __init__(self, request_id: str, message_id: str, model: str) -> None:
        """`model`: as the caller named it."""
        self._request_id = request_id
        self._model = model
        self._message_id = message_id
        self._started = False
        self._index = -1  # of the last block
        self._open: str | int | None = None  # the block: text, thinking, or the place of a call
        self._places: set[int] = set()  # of calls that have begun
        self._finish_reason: Any = None
        self._stop_reason: Any = None
        self._usage: Any = None
        self._failed = False  # an error was sent: nothing may follow
        self._problem: str | None = None  # that was found here

    def of_chunk(self, chunk: dict[str, Any]) -> bytes:
        if self._failed:
            return b""
        if "comment" in chunk:
            return _event("ping") if self._started else f": {chunk['comment']}\n\n".encode()
        if chunk.get("error") is not None:
            return self._error(chunk["error"])
        events = [] if self._started else [self._start(chunk)]
        self._usage = chunk.get("usage") or self._usage
        choice = first_choice(chunk)
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        self._stop_reason = choice.get("stop_reason") or self._stop_reason
        delta = choice.get("delta")
        if isinstance(delta, dict):
            self._add_delta(events, delta)
        return b"".join(events)

    def problem(self) -> str | None:
        """When no more comes: what is wrong with the answer, if that has not been told. Once."""
        if not self._failed and self._finish_reason is None:
            return _BROKE_OFF
        problem, self._problem = self._problem, None
        return problem

    def last(self) -> bytes:
        """When no more comes."""
        if self._failed:
            return b""
        events: list[bytes] = []
        self._close(events)
        reason, sequence = stop_facts(self._finish_reason, self._stop_reason, has_calls=bool(self._places))
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        events += [_event("message_delta", delta=delta, usage=usage_fields(self._usage)), _event("message_stop")]
        return b"".join(events)

    def _start(self, chunk: dict[str, Any]) -> bytes:
        self._started = True
        message: dict[str, Any] = {
            "id": self._message_id, "type": "message", "role": "assistant", "model": chunk.get("model") or self._model,
            "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage_fields(chunk.get("usage")),
        }  # fmt: skip
        if chunk.get("warnings"):
            message["warnings"] = chunk["warnings"]
        return _event("message_start", message=message)

    def _add_delta(self, events: list[bytes], delta: dict[str, Any]) -> None:
        if thoughts := thoughts_of(delta):
            self._begin(events, THINKING, {"type": "thinking", "thinking": "", "signature": ""})
            events.append(self._delta({"type": "thinking_delta", "thinking": thoughts}))
        if text := text_of(delta):
            self._begin(events, TEXT, {"type": "text", "text": ""})
            events.append(self._delta({"type": "text_delta", "text": text}))
        for position, call in enumerate(calls_of(delta)):
            if not self._failed:
                self._add_call(events, call, place_of(call, position))

    def _add_call(self, events: list[bytes], call: dict[str, Any], place: int) -> None:
        if place not in self._places:
            name = string_in(call.get("function"), "name")
            if not name:
                self._fail(events, _NAMELESS)
                return
            self._places.add(place)
            call_id = string_in(call, "id") or f"call_{place}"
            self._begin(events, place, {"type": "tool_use", "id": call_id, "name": name, "input": {}})
        elif self._open != place:
            self._fail(events, _MIXED)
            return
        if arguments := string_in(call.get("function"), "arguments"):
            events.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))

    def _begin(self, events: list[bytes], block: str | int, content: dict[str, Any]) -> None:
        """`block` is open after this."""
        if self._open == block:
            return
        self._close(events)
        self._open = block
        self._index += 1
        events.append(_event("content_block_start", index=self._index, content_block=content))

    def _close(self, events: list[bytes]) -> None:
        if self._open is None:
            return
        if self._open == THINKING:  # clients expect one, and send it back; it is not looked at
            events.append(self._delta({"type": "signature_delta", "signature": self._message_id}))
        events.append(_event("content_block_stop", index=self._index))
        self._open = None

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _fail(self, events: list[bytes], problem: str) -> None:
        self._problem = problem
        events.append(self._error({"message": problem}))

    def _error(self, error: Any) -> bytes:
        self._failed = True
        body = msgspec.json.encode(messages_event(error, self._request_id))
        return b"event: error\ndata: %b\n\n" % body


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))
