"""`Collector`: puts a reply together while its bytes pass through, whole or streamed, into an `Answer`.

Does: collect texts, finish reasons, usage, ids, errors, and when the first and last text came; take a usage chunk out of a
stream. Does not: decode (`replies.py`), send, wait, or hold a complete event back.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tonle.protocol import sse
from tonle.protocol.replies import EventReader, Reply, ReplyDelta, content_text, decode_reply

EVENT_STREAM = sse.MEDIA_TYPE
MAX_BODY_BYTES = 64 * 1024**2  # of a reply that is not a stream; of a longer one only the size is kept

_NULL_USAGE = (b',"usage":null', b', "usage": null')  # cannot occur inside a JSON string, where quotes are escaped


@dataclass(slots=True)
class Choice:
    """One answer of a reply that may hold several."""

    pieces: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class Answer:
    """What came back, as far as it came."""

    choices: dict[int, Choice] = field(default_factory=dict)
    response_id: str | None = None
    model: str | None = None
    usage: dict[str, Any] | None = None
    error: Any = None  # an error body, or an error event inside a stream
    raw: Any = None  # a reply that is none of those we know, as it came
    first_s: float | None = None  # monotonic; the first text
    last_s: float | None = None
    engine_s: dict[str, float] | None = None  # queue, prefill, decode, where an engine in this process tells them
    complete: bool = False  # False: the reply broke off

    def add_text(self, index: int, text: str, now_s: float) -> None:
        choice = self.choices.get(index)
        if choice is None:
            choice = self.choices[index] = Choice()
        choice.pieces.append(text)
        self.last_s = now_s
        if self.first_s is None:
            self.first_s = now_s

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[min(self.choices)].text if self.choices else ""

    @property
    def finish_reason(self) -> str | None:
        return self.choices[min(self.choices)].finish_reason if self.choices else None


class Collector:
    """Feed it every piece of the body in order, pass on what it returns, then `finish`."""

    __slots__ = ("_answer", "_body", "_events", "_held", "_size", "_stream", "_swallow")

    def __init__(self, content_type: str | None, *, swallow_usage: bool = False) -> None:
        """`swallow_usage`: the caller did not ask for the usage chunk, so it is taken out of the stream."""
        self._stream = (content_type or "").partition(";")[0].strip().lower() == EVENT_STREAM
        self._swallow = swallow_usage and self._stream
        self._answer = Answer()
        self._events = EventReader()
        self._held = b""  # the beginning of an event that may have to be taken out
        self._body: list[bytes] = []
        self._size = 0

    @property
    def answer(self) -> Answer:
        """As far as it came."""
        return self._answer

    def feed(self, piece: bytes) -> bytes:
        """Returns what to pass on. Without `swallow_usage` that is `piece` itself."""
        self._size += len(piece)
        if self._swallow:
            return self._filter(piece)
        if self._stream:
            self._take_events(piece)
        elif self._size <= MAX_BODY_BYTES:
            self._body.append(piece)
        return piece

    def _filter(self, piece: bytes) -> bytes:
        if not self._held and piece.endswith(sse.END):
            plain = _without_null_usage(piece)
            if b'"usage"' not in plain:
                self._take_events(plain)
                return plain
        *events, self._held = sse.split(self._held + piece)
        return b"".join([_without_null_usage(event) for event in events if not self._take_events(event)])

    def _take_events(self, events: bytes) -> bool:
        """True if it is one chunk with nothing but usage."""
        replies = self._events.feed(events)
        for reply in replies:
            self._take(reply)
        self._answer.complete |= self._events.done
        return len(replies) == 1 and replies[0].usage is not None and replies[0].choices == []

    def rest(self) -> bytes:
        """What was held back and never became a whole event; to be passed on at the end of the body."""
        return self._held

    def finish(self) -> Answer:
        """The answer, when no more comes. Safe to call at any point, once."""
        if self._stream:
            if self._held:
                self._take_events(self._held)
                self._held = b""
            for reply in self._events.finish():
                self._take(reply)
            self._answer.complete |= self._events.done
            for choice in self._answer.choices.values():
                choice.pieces = [choice.text]  # one text is quicker to hand on than many
        elif self._size > MAX_BODY_BYTES:
            self._answer.raw = f"a reply of {self._size} bytes, too large to record"
        elif self._body:
            self._take_whole(b"".join(self._body))
            self._body.clear()
        return self._answer

    def _take_whole(self, body: bytes) -> None:
        self._answer.complete = True
        try:
            reply = decode_reply(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._answer.raw = body.decode(errors="replace")
            return
        if reply.choices is None and reply.error is None:
            self._answer.raw = msgspec.json.decode(body)
        self._take(reply)

    def _take(self, reply: Reply) -> None:
        answer = self._answer
        answer.response_id = answer.response_id or reply.id
        answer.model = reply.model or answer.model
        if reply.usage is not None:
            answer.usage = {**answer.usage, **reply.usage} if answer.usage else reply.usage
        if reply.error is not None:
            answer.error = reply.error
        if reply.choices is None:
            self._take_foreign(reply)
            return
        for part in reply.choices:
            choice = answer.choices.get(part.index)
            if choice is None:
                choice = answer.choices[part.index] = Choice()
            if part.finish_reason is not None:
                choice.finish_reason = part.finish_reason
            if part.text:
                choice.pieces.append(part.text)
                self._stamp()
            if (delta := part.delta or part.message) is not None:
                self._take_delta(choice, delta)

    def _take_delta(self, choice: Choice, delta: ReplyDelta) -> None:
        if delta.content:
            choice.pieces.append(content_text(delta.content))
        elif thought := delta.reasoning_content or delta.reasoning:
            choice.reasoning.append(thought)
        elif delta.tool_calls:
            pass
        else:
            return
        for position, call in enumerate(delta.tool_calls or ()):
            _merge_call(choice.tool_calls, call, position)
        self._stamp()

    def _take_foreign(self, event: Reply) -> None:
        """Streams of /v1/responses and /v1/messages: the text is in `delta`, usage and id in a nested object."""
        answer, delta = self._answer, event.delta
        text = delta.get("text") if isinstance(delta, dict) else delta
        if isinstance(text, str) and text:
            answer.choices.setdefault(0, Choice()).pieces.append(text)
            self._stamp()
        for nested in (event.response, event.message):
            if isinstance(nested, dict):
                answer.response_id = answer.response_id or nested.get("id")
                answer.model = answer.model or nested.get("model")
                if isinstance(nested.get("usage"), dict):
                    answer.usage = {**(answer.usage or {}), **nested["usage"]}
        if event.type in ("response.completed", "message_stop"):
            answer.complete = True

    def _stamp(self) -> None:
        self._answer.last_s = time.monotonic()
        if self._answer.first_s is None:
            self._answer.first_s = self._answer.last_s


def _merge_call(calls: dict[int, dict[str, Any]], call: dict[str, Any], position: int) -> None:
    """Tool calls come in pieces too: their arguments are text that grows. What is malformed is kept as it came."""
    index = call.get("index")
    known = calls.setdefault(index if isinstance(index, int) else position, {})
    for name, value in call.items():
        if name == "function" and isinstance(value, dict):
            function = known.get("function")
            if not isinstance(function, dict):
                function = known["function"] = {"name": "", "arguments": ""}
            for part in ("name", "arguments"):
                piece = value.get(part) or ""
                function[part] += piece if isinstance(piece, str) else str(piece)
        elif name != "index" and value is not None:
            known[name] = value


def _without_null_usage(event: bytes) -> bytes:
    if b'"usage"' in event:
        for null in _NULL_USAGE:
            event = event.replace(null, b"")
    return event
