"""What a backend answers at /v1/chat/completions, read for APIs that tell it in a shape of their own.

Does: turn the bytes of a stream, however they are cut, into chunks; find the first choice of a chunk or a whole answer.
Does not: write a shape. A backend may send anything: nothing here raises, except `whole_answer`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tonle.gateway.refusals import UpstreamFailed
from tonle.protocol import sse

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class ChatChunks:
    """Reads a stream of chat chunks. Each byte is looked at a fixed number of times, into however many pieces it is cut.

    What `feed` and `finish` return, in order:
    - a chunk as it was sent, decoded: it may have `choices`, `usage`, `model`, `warnings` and anything else;
    - an error event as it was sent: it has `error`, which is not null. `failed` is True from then on;
    - a comment as `{"comment": text}`, and nothing else in it: the stream is alive, and waits. No chunk has that field.
    `[DONE]` sets `done`. What is not a JSON object is left out.
    """

    __slots__ = ("_events", "done", "failed")

    def __init__(self) -> None:
        self.done = False  # [DONE] was seen
        self.failed = False  # an error event was seen
        self._events = sse.EventSplitter()

    def feed(self, piece: bytes) -> list[dict[str, Any]]:
        """The chunks that end in `piece`."""
        return [chunk for event in self._events.push(piece) if (chunk := self._read(event)) is not None]

    def finish(self) -> list[dict[str, Any]]:
        """The last chunk, if the stream ended without the empty line after it."""
        chunk = self._read(self._events.rest())
        return [] if chunk is None else [chunk]

    def _read(self, event: bytes) -> dict[str, Any] | None:
        if event.startswith(b":"):
            comment, _, _ = event[1:].lstrip(b" ").partition(b"\n")
            return {"comment": comment.rstrip(b"\r").decode(errors="replace")}
        data = sse.payload(event)
        if data == b"[DONE]":
            self.done = True
            return None
        chunk = decoded(data) if data else None
        if not isinstance(chunk, dict):
            return None
        chunk.pop("comment", None)
        self.failed |= chunk.get("error") is not None
        return chunk


def decoded(text: bytes) -> Any:
    """None if it is not JSON."""
    try:
        return msgspec.json.decode(text)
    except UNREADABLE:
        return None


def first_choice(reply: dict[str, Any]) -> dict[str, Any]:
    """Of a chunk or a whole answer; empty if there is none."""
    choices = reply.get("choices")
    found = choices[0] if isinstance(choices, list) and choices else None
    return found if isinstance(found, dict) else {}


def whole_answer(body: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """A chat answer that is not streamed, and its first choice, which has a message. Raises `UpstreamFailed`."""
    answer = decoded(body)
    choice = first_choice(answer) if isinstance(answer, dict) else {}
    if not isinstance(answer, dict) or not isinstance(choice.get("message"), dict):
        raise UpstreamFailed("the answer of the backend is not a chat completion")
    return answer, choice
