"""`Collector`: what a reply said, learned while its bytes pass by.

Does: parse OpenAI replies, whole or as server-sent events cut anywhere, into an `Answer`: texts, finish reasons, usage,
ids, errors, and when the first and last text came. Does not: send, wait, or hold a complete event back.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

EVENT_STREAM = "text/event-stream"
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


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    delta: _Delta | None = None
    message: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Reply(msgspec.Struct, gc=False):
    """The union of whole replies and chunks, chat and plain; other fields are passed over."""

    id: str | None = None
    model: str | None = None
    choices: list[_Choice] | None = None
    usage: dict[str, Any] | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Reply).decode
_decode_all = msgspec.json.Decoder(list[_Reply]).decode

_DATA, _END, _DONE = b"data: ", b"\n\n", b"data: [DONE]\n\n"


class Collector:
    """Feed it every piece of the body in order, pass on what it returns, then `finish`."""

    __slots__ = ("_answer", "_body", "_size", "_stream", "_swallow", "_tail")

    def __init__(self, content_type: str | None, *, swallow_usage: bool = False) -> None:
        """`swallow_usage`: the usage chunk was not the caller's wish, and is taken out of the stream."""
        self._stream = (content_type or "").partition(";")[0].strip().lower() == EVENT_STREAM
        self._swallow = swallow_usage and self._stream
        self._answer = Answer()
        self._tail = b""  # of an event that has not ended
        self._body: list[bytes] = []
        self._size = 0

    @property
    def answer(self) -> Answer:
        """As far as it came."""
        return self._answer

    def feed(self, piece: bytes) -> bytes:
        """Returns what to pass on. Without `swallow_usage` that is `piece` itself."""
        self._size += len(piece)
        if not self._stream:
            if self._size <= MAX_BODY_BYTES:
                self._body.append(piece)
            return piece
        if not self._tail and (passed := self._take_plain(piece)) is not None:
            return passed
        return self._take_events(self._tail + piece if self._tail else piece, piece)

    def _take_plain(self, piece: bytes) -> bytes | None:
        """The usual case, many times as fast: whole events of one line each, read in one go. None if it is not that."""
        if not (piece.startswith(_DATA) and piece.endswith(_END)):
            return None
        plain = piece
        rest = b""  # from the first event that may have to be taken out
        if self._swallow and b'"usage"' in piece:
            for null in _NULL_USAGE:
                plain = plain.replace(null, b"")
            if (usage := plain.find(b'"usage"')) >= 0:
                before = plain.rfind(_END, 0, usage)
                if before < 0:
                    return None
                plain, rest = plain[: before + len(_END)], plain[before + len(_END) :]
        is_done = plain.endswith(_DONE)
        payloads = plain[len(_DATA) : -len(_DONE) if is_done else -len(_END)].removesuffix(_END)
        try:
            replies = _decode_all(b"[%b]" % payloads.replace(_END + _DATA, b","))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if any(reply.choices is None for reply in replies):
            return None
        for reply in replies:
            self._take(reply)
        self._answer.complete |= is_done
        return plain + self._take_events(rest, rest) if rest else plain

    def _take_events(self, stream: bytes, piece: bytes) -> bytes:
        """One by one. `stream` is `piece` after what was left of the one before."""
        events = _split(stream)
        self._tail = events.pop()
        if not self._swallow:
            for event in events:
                self._take_event(event)
            return piece
        return b"".join([self._filtered(event) for event in events])

    def rest(self) -> bytes:
        """What was held back and never became a whole event; to be passed on at the end of the body."""
        return self._tail if self._swallow else b""

    def finish(self) -> Answer:
        """The answer, when no more comes. Safe to call at any point, once."""
        if self._stream:
            if self._tail:
                self._take_event(self._tail)
                self._tail = b""
            for choice in self._answer.choices.values():
                choice.pieces = [choice.text]  # one text is quicker to hand on than many
        elif self._size > MAX_BODY_BYTES:
            self._answer.raw = f"a reply of {self._size} bytes, too large to record"
        elif self._body:
            self._take_whole(b"".join(self._body))
            self._body.clear()
        return self._answer

    def _filtered(self, event: bytes) -> bytes:
        if self._take_event(event):
            return b""
        if b'"usage"' in event:
            for null in _NULL_USAGE:
                event = event.replace(null, b"")
        return event

    def _take_event(self, event: bytes) -> bool:
        """True if it is a chunk with nothing but usage."""
        data = _data(event)
        if not data:
            return False
        if data == b"[DONE]":
            self._answer.complete = True
            return False
        try:
            reply = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        if reply.choices is None:
            take_foreign_event(data, self._answer)
        self._take(reply)
        return reply.usage is not None and reply.choices == []

    def _take_whole(self, body: bytes) -> None:
        self._answer.complete = True
        try:
            reply = _decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._answer.raw = body.decode(errors="replace")
            return
        if reply.choices is None and reply.error is None:
            self._answer.raw = msgspec.json.decode(body)
        self._take(reply)

    def _take(self, reply: _Reply) -> None:
        answer = self._answer
        answer.response_id = answer.response_id or reply.id
        answer.model = reply.model or answer.model
        if reply.usage is not None:
            answer.usage = {**answer.usage, **reply.usage} if answer.usage else reply.usage
        if reply.error is not None:
            answer.error = reply.error
        for part in reply.choices or ():
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

    def _take_delta(self, choice: Choice, delta: _Delta) -> None:
        if delta.content:
            choice.pieces.append(delta.content)
        elif thought := delta.reasoning_content or delta.reasoning:
            choice.reasoning.append(thought)
        elif delta.tool_calls:
            pass
        else:
            return
        for position, call in enumerate(delta.tool_calls or ()):
            _merge_call(choice.tool_calls, call, position)
        self._stamp()

    def _stamp(self) -> None:
        self._answer.last_s = time.monotonic()
        if self._answer.first_s is None:
            self._answer.first_s = self._answer.last_s


def take_foreign_event(data: bytes, answer: Answer) -> None:
    """Streams of /v1/responses and /v1/messages: the text is in `delta`, usage and id in a nested object."""
    event = msgspec.json.decode(data)
    if not isinstance(event, dict):
        return
    delta = event.get("delta")
    text = delta if isinstance(delta, str) else delta.get("text") if isinstance(delta, dict) else None
    if isinstance(text, str) and text:
        answer.choices.setdefault(0, Choice()).pieces.append(text)
        answer.last_s = time.monotonic()
        answer.first_s = answer.first_s or answer.last_s
    for nested in (event.get("response"), event.get("message")):
        if isinstance(nested, dict):
            answer.response_id = answer.response_id or nested.get("id")
            answer.model = answer.model or nested.get("model")
            if isinstance(nested.get("usage"), dict):
                answer.usage = {**(answer.usage or {}), **nested["usage"]}
    if event.get("type") in ("response.completed", "message_stop"):
        answer.complete = True


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


def _split(stream: bytes) -> list[bytes]:
    """Whole events with the blank line that ends them, and last what is left. Line ends may be \\n, \\r\\n or \\r."""
    if b"\r" not in stream:
        *whole, tail = stream.split(b"\n\n")
        return [event + b"\n\n" for event in whole] + [tail]
    events, start, line_start, position = [], 0, 0, 0
    while (position := _line_end(stream, position)) >= 0:
        is_pair = stream[position : position + 2] == b"\r\n"
        if stream[position] == 0x0D and position + 1 == len(stream):
            break  # the \n of a \r\n may still come
        is_blank = position == line_start
        position += 2 if is_pair else 1
        line_start = position
        if is_blank:
            events.append(stream[start:position])
            start = position
    return [*events, stream[start:]]


def _line_end(stream: bytes, start: int) -> int:
    """The next \\r or \\n; -1 if there is none, as bytes.find says it."""
    ends = [end for end in (stream.find(b"\n", start), stream.find(b"\r", start)) if end >= 0]
    return min(ends, default=-1)


def _data(event: bytes) -> bytes:
    """The payload of an event: its `data:` lines joined."""
    if event.startswith(b"data: ") and event.find(b"\n") >= len(event) - 2:  # one line, by far the usual case
        return event[6:].strip()
    lines = event.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")).strip()
