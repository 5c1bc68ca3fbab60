"""`Collector`: puts a reply together while its bytes pass through, whole or streamed, into an `Answer`.

Does: collect texts, finish reasons, usage, ids, errors, and when the first and last text came, as much of them as a record
may hold; take a usage chunk out of a stream. Does not: decode (`replies.py`), send, wait, or hold a complete event back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tonle.protocol import sse
from tonle.protocol.embeddings import vectors_summary
from tonle.protocol.replies import (
    UNREADABLE,
    EventReader,
    Reply,
    ReplyDelta,
    content_text,
    decode_reply,
    decode_usage,
    foreign_part,
)

EVENT_STREAM = sse.MEDIA_TYPE
MAX_BODY_BYTES = 64 * 1024**2  # of a reply that is not a stream; of a longer one only the size is kept
MAX_TEXT_CHARS = 64 * 1024**2  # of the texts of a stream, all choices together; the rest is not kept
MAX_CHOICES = 1024  # of a reply; more are not kept
MAX_PARTS = 4 * 1024**2  # objects and lists in a reply that is not a stream: each takes a hundred bytes in memory
_JOIN_EVENTS = 4096  # after so many, pieces of texts are joined: a short piece takes many times its length

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

    def all_pieces(self) -> Iterator[str]:
        """Of its text, its reasoning, and the names and arguments of its calls."""
        yield from self.pieces
        yield from self.reasoning
        for call in self.tool_calls.values():
            if isinstance(function := call.get("function"), dict):
                for part in function.values():
                    yield from (part,) if isinstance(part, str) else part

    def texts(self) -> Iterator[list[str]]:
        """All that grow as pieces come, until `finish`."""
        yield self.pieces
        yield self.reasoning
        for call in self.tool_calls.values():
            if isinstance(function := call.get("function"), dict):
                yield from (pieces for pieces in function.values() if isinstance(pieces, list))

    def finish(self) -> None:
        """Texts in one piece, which is quicker to hand on. May be called again."""
        self.pieces = [self.text]
        if self.reasoning:
            self.reasoning = ["".join(self.reasoning)]
        for call in self.tool_calls.values():
            if isinstance(function := call.get("function"), dict):
                call["function"] = {part: "".join(pieces) for part, pieces in function.items()}


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
    spent: Any = None  # the same in detail: a `TimeSpent`, which the audit's process need not know
    complete: bool = False  # False: the reply broke off
    cut: bool = False  # there was more text than is kept

    # -- for a sender that fills it itself; `index` is that of the choice, `now_s` monotonic

    def add_text(self, index: int, text: str, now_s: float) -> None:
        self._touched(index, now_s).pieces.append(text)

    def add_reasoning(self, index: int, text: str, now_s: float) -> None:
        self._touched(index, now_s).reasoning.append(text)

    def add_call(self, index: int, call_index: int, call_id: str, name: str, now_s: float) -> None:
        """A tool is called; its arguments follow."""
        function = {"name": [name], "arguments": []}
        self._touched(index, now_s).tool_calls[call_index] = {"id": call_id, "type": "function", "function": function}

    def add_arguments(self, index: int, call_index: int, text: str, now_s: float) -> None:
        """A piece of the arguments of a call that was added before, and is not finished."""
        self._touched(index, now_s).tool_calls[call_index]["function"]["arguments"].append(text)

    def _touched(self, index: int, now_s: float) -> Choice:
        choice = self.choices.get(index)
        if choice is None:
            choice = self.choices[index] = Choice()
        self.last_s = now_s
        if self.first_s is None:
            self.first_s = now_s
        return choice

    def finish(self) -> None:
        """When no more is added. May be called again."""
        for choice in self.choices.values():
            if len(choice.pieces) != 1 or choice.tool_calls or len(choice.reasoning) > 1:
                choice.finish()

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[min(self.choices)].text if self.choices else ""

    @property
    def finish_reason(self) -> str | None:
        return self.choices[min(self.choices)].finish_reason if self.choices else None


# Of a reply that is not a stream, or of which nothing is taken out: never fed.
_NO_EVENTS = EventReader()
_NOTHING_HELD = sse.EventSplitter()


class Collector:
    """Feed it every piece of the body in order, pass on what it returns, then `finish`."""

    __slots__ = (
        "_answer", "_body", "_events", "_held", "_joined", "_num_chars", "_num_events", "_size", "_stream", "_swallow",
    )  # fmt: skip

    def __init__(self, content_type: str | None, *, swallow_usage: bool = False) -> None:
        """`swallow_usage`: the caller did not ask for the usage chunk, so it is taken out of the stream."""
        self._stream = (content_type or "").partition(";")[0].strip().lower() == EVENT_STREAM
        self._swallow = swallow_usage and self._stream
        self._answer = Answer()
        self._events = EventReader() if self._stream else _NO_EVENTS
        # The beginning of an event that may have to be taken out
        self._held = sse.EventSplitter() if self._swallow else _NOTHING_HELD
        self._body: list[bytes] = []
        self._size = 0
        self._num_chars = 0  # kept
        self._num_events = 0  # since pieces were joined
        self._joined: dict[int, int] = {}  # how many pieces of a list, by its id, were joined before

    @property
    def answer(self) -> Answer:
        """As far as it came."""
        return self._answer

    @property
    def oversized(self) -> bool:
        """An event of the stream was too large: it and what follows are passed on unread."""
        return self._events.oversized

    @property
    def holding(self) -> bool:
        """Something is held back."""
        return self._held.holding

    def feed(self, piece: bytes) -> bytes:
        """Returns what to pass on. Without `swallow_usage` that is `piece` itself."""
        self._size += len(piece)
        if self._swallow:
            return self._filter(piece)
        if self._stream:
            self._take_events(piece)
        elif self._size <= MAX_BODY_BYTES:
            self._body.append(piece)
        else:
            self._body.clear()
        return piece

    def _filter(self, piece: bytes) -> bytes:
        if not self._held.holding and piece.endswith(sse.END):
            plain = _without_null_usage(piece)
            if b'"usage"' not in plain:
                self._take_events(plain)
                return plain
        passed = self._without_usage(self._held.push(piece))
        if self._held.oversized:
            self._swallow = False
            held = self._held.rest()
            self._take_events(held)  # which is too large for it, too
            return passed + held
        return passed

    def _without_usage(self, events: list[bytes]) -> bytes:
        """Events without the chunk that has nothing but usage. Those that do not mention it are read together."""
        passed: list[bytes] = []
        unread: list[bytes] = []
        for event in map(_without_null_usage, events):
            if b'"usage"' not in event:
                unread.append(event)
                continue
            if unread:
                self._take_events(b"".join(unread))
                passed += unread
                unread = []
            if not self._take_events(event):
                passed.append(event)
        if unread:
            self._take_events(b"".join(unread))
        return b"".join(passed + unread)

    def _take_events(self, events: bytes) -> bool:
        """True if it is one chunk with nothing but usage."""
        num_chars = self._num_chars
        replies = self._events.feed(events)
        for reply in replies:
            self.take(reply)
        if self._num_chars > num_chars:
            self._stamp()
        self._answer.complete |= self._events.done
        self._num_events += len(replies)
        if self._num_events >= _JOIN_EVENTS:
            self._num_events = 0
            self._join()
        return len(replies) == 1 and replies[0].usage is not None and replies[0].choices == []

    def _join(self) -> None:
        """Make one piece of those of each text that came since the last time."""
        for choice in self._answer.choices.values():
            for pieces in choice.texts():
                start = self._joined.get(id(pieces), 0)
                if len(pieces) > start + 1:
                    pieces[start:] = ["".join(pieces[start:])]
                self._joined[id(pieces)] = len(pieces)

    def rest(self) -> bytes:
        """What was held back and never became a whole event; to be passed on at the end of the body."""
        if not self._held.holding:
            return b""
        rest = self._held.rest()
        self._take_events(rest)
        return rest

    def finish(self) -> Answer:
        """The answer, when no more comes. Safe to call at any point, once."""
        if self._stream:
            self.rest()
            num_chars = self._num_chars
            for reply in self._events.finish():
                self.take(reply)
            if self._num_chars > num_chars:
                self._stamp()
            self._answer.complete |= self._events.done
        elif self._size > MAX_BODY_BYTES:
            self._answer.raw = f"a reply of {self._size} bytes, too large to record"
        elif self._body:
            self._take_whole(b"".join(self._body))
            self._body.clear()
        self._answer.finish()
        return self._answer

    def _take_whole(self, body: bytes) -> None:
        answer = self._answer
        answer.complete = True
        if len(body) > MAX_PARTS and body.count(b"{") + body.count(b"[") > MAX_PARTS:
            answer.raw = f"a reply of {len(body)} bytes, too large to record"
            answer.usage = decode_usage(body)
            return
        try:
            reply = decode_reply(body)
            if reply.choices is None and reply.error is None:
                answer.raw = vectors_summary(body) or msgspec.json.decode(body)
        except UNREADABLE:
            answer.raw = body.decode(errors="replace")
            return
        self.take(reply)
        self._stamp()

    def take(self, reply: Reply) -> None:
        """An event that the caller has decoded, in place of `feed`."""
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
                if len(answer.choices) >= MAX_CHOICES:
                    answer.cut = True
                    continue
                choice = answer.choices[part.index] = Choice()
            if part.finish_reason is not None:
                choice.finish_reason = part.finish_reason
            if part.text:
                self._keep(choice.pieces, part.text)
            if (delta := part.delta or part.message) is not None:
                self._take_delta(choice, delta)

    def _take_delta(self, choice: Choice, delta: ReplyDelta) -> None:
        if content := delta.content:
            self._keep(choice.pieces, content if isinstance(content, str) else content_text(content))
        if thought := delta.reasoning_content or delta.reasoning:
            self._keep(choice.reasoning, thought)
        for position, call in enumerate(delta.tool_calls or ()):
            self._merge_call(choice.tool_calls, call, position)
        if delta.function_call is not None:  # the older form of one call, which has no id
            self._merge_call(choice.tool_calls, {"function": delta.function_call}, 0)

    def _keep(self, pieces: list[str], text: str) -> None:
        self._num_chars += len(text)
        if self._num_chars <= MAX_TEXT_CHARS:
            pieces.append(text)
        else:
            self._answer.cut = True

    def _take_foreign(self, event: Reply) -> None:
        """Streams of /v1/responses and /v1/messages: texts are in `delta`, usage and id in a nested object."""
        answer = self._answer
        if event.delta is not None or event.item is not None or event.content_block is not None:
            self._take_foreign_delta(event)
        for nested in (event.response, event.message):
            if isinstance(nested, dict):
                answer.response_id = answer.response_id or nested.get("id")
                answer.model = answer.model or nested.get("model")
                if isinstance(nested.get("usage"), dict):
                    answer.usage = {**(answer.usage or {}), **nested["usage"]}
        if event.type in ("response.completed", "message_stop"):
            answer.complete = True

    def _take_foreign_delta(self, event: Reply) -> None:
        choice = self._answer.choices.get(0) or Choice()
        kind, part = foreign_part(event)
        if kind == "call" and part is not None:
            self._merge_call(choice.tool_calls, part, len(choice.tool_calls))
        elif isinstance(part, str) and part:
            self._keep(choice.reasoning if kind == "reasoning" else choice.pieces, part)
        else:
            return
        self._answer.choices[0] = choice

    def _merge_call(self, calls: dict[int, dict[str, Any]], call: dict[str, Any], position: int) -> None:
        """Tool calls come in pieces too: name and arguments are texts that grow. What is malformed is kept as it came."""
        index = call.get("index")
        place = index if isinstance(index, int) else position
        if place not in calls and len(calls) >= MAX_CHOICES:
            self._answer.cut = True
            return
        known = calls.setdefault(place, {})
        for name, value in call.items():
            if name == "function" and isinstance(value, dict):
                function = known.get("function")
                if not isinstance(function, dict):
                    function = known["function"] = {"name": [], "arguments": []}
                for part in ("name", "arguments"):
                    if piece := value.get(part):
                        self._keep(function[part], piece if isinstance(piece, str) else str(piece))
            elif name != "index" and value is not None:
                known[name] = value
        self._stamp()

    def _stamp(self) -> None:
        self._answer.last_s = time.monotonic()
        if self._answer.first_s is None:
            self._answer.first_s = self._answer.last_s


def _without_null_usage(event: bytes) -> bytes:
    if b'"usage"' in event:
        for null in _NULL_USAGE:
            event = event.replace(null, b"")
    return event
