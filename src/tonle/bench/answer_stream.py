"""`StreamedAnswer`: what one answer brought, and when.

Does: note when a chunk brought text or token ids, pick up usage, finish reason and errors; keep the texts if asked to; take a
reply that came in one piece. Does not: decode events (`protocol/replies.py`), read the clock or touch sockets. `feed` runs once
per network read: the client's hot path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tonle.bench.measure import TokenSource
from tonle.protocol.answers import EVENT_STREAM, Answer, Collector
from tonle.protocol.replies import (
    UNREADABLE,
    EventReader,
    Reply,
    ReplyDelta,
    decode_reply,
    decode_usage,
    error_text,
    foreign_part,
)

_ENDINGS = ("response.completed", "response.incomplete", "message_stop")  # of /v1/responses and /v1/messages
_FOREIGN_COUNTS = {"input_tokens": "prompt_tokens", "output_tokens": "completion_tokens"}


class StreamedAnswer:
    """Owns what one answer said, and when."""

    items: int | None = None  # of other kinds of requests
    audio_s: float | None = None

    __slots__ = (
        "_collector", "_ended", "_error", "_events", "arrivals_s", "finish_reason", "last_s", "num_token_ids", "timings",
        "usage",
    )  # fmt: skip

    def __init__(self, *, keep_texts: bool = False) -> None:
        self.arrivals_s: list[float] = []  # chunks with text or token ids
        self.last_s: float | None = None  # last chunk with a choice
        self.num_token_ids = 0
        self.usage: dict[str, Any] = {}
        self.timings: Any = None
        self.finish_reason: str | None = None
        self._error: Any = None  # sent inside the stream
        self._ended = False  # in a way that is neither a finish reason nor [DONE]
        self._events = EventReader()
        self._collector = Collector(EVENT_STREAM) if keep_texts else None

    def feed(self, data: bytes, now_s: float) -> None:
        """Take bytes that arrived at `now_s`. Never raises: what cannot be read becomes `failure`."""
        for reply in self._events.feed(data):
            self._take(reply, now_s)

    def finish(self, now_s: float, headers: Mapping[str, str] | None = None) -> None:
        """No more bytes come. The last event counts even without the empty line after it."""
        for reply in self._events.finish():
            self._take(reply, now_s)

    def take_whole(self, body: bytes, content_type: str, now_s: float) -> None:
        """A reply that is not a stream. What is in it counts as one chunk; one without choices has no text to wait for."""
        self._ended = True
        if self._collector is not None:
            self._collector = Collector(content_type)
            self._collector.feed(body)
        try:
            reply = decode_reply(body)
        except UNREADABLE:
            self.usage = decode_usage(body) or {}
        else:
            self._take(reply, now_s, whole=True)
            if reply.choices is None and reply.usage is None:
                self.usage = _metadata(body)
        self.last_s = now_s

    def collected(self) -> Answer | None:
        """The texts and tool calls, if they were kept. Once, at the end."""
        return None if self._collector is None else self._collector.finish()

    def _take(self, reply: Reply, now_s: float, *, whole: bool = False) -> None:
        if self._collector is not None and not whole:
            self._collector.take(reply)
        if reply.choices:
            choice = reply.choices[0]
            self.last_s = now_s
            if choice.text or choice.token_ids or (choice.delta is not None and _says_something(choice.delta)):
                self.arrivals_s.append(now_s)
            if choice.token_ids:
                self.num_token_ids += len(choice.token_ids)
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
        elif reply.type is not None:
            self._take_foreign(reply, now_s)
        if reply.usage is not None:
            self.usage = reply.usage
        if reply.timings is not None:
            self.timings = reply.timings
        if reply.error is not None and self._error is None:
            self._error = reply.error

    def _take_foreign(self, event: Reply, now_s: float) -> None:
        """Events of /v1/responses and /v1/messages."""
        if event.type in _ENDINGS:
            self._ended = True
            self.last_s = now_s
        elif foreign_part(event)[1]:
            self.arrivals_s.append(now_s)
            self.last_s = now_s
        nested = event.response if isinstance(event.response, dict) else event.message
        for usage in (nested.get("usage") if isinstance(nested, dict) else None, event.usage):
            if isinstance(usage, dict):
                named = {_FOREIGN_COUNTS.get(name, name): count for name, count in usage.items()}
                details = named.pop("input_tokens_details", None)
                self.usage = self.usage | named | ({} if details is None else {"prompt_tokens_details": details})
        event.usage = None  # taken

    @property
    def done(self) -> bool:
        """[DONE] was seen."""
        return self._events.done

    @property
    def failure(self) -> str | None:
        """What was wrong, "kind: detail"."""
        if self._error is not None:
            return f"error in stream: {error_text(self._error)}"
        return None if self._events.problem is None else f"unreadable answer: {self._events.problem}"

    @property
    def complete(self) -> bool:
        """The server said that this is all."""
        return self.done or self._ended or self.finish_reason is not None

    @property
    def prompt_tokens(self) -> int | None:
        return _count(self.usage, "prompt_tokens")

    @property
    def cached_tokens(self) -> int | None:
        """llama-server says in `timings` what it took from its cache."""
        details = _count(self.usage.get("prompt_tokens_details"), "cached_tokens")
        return details if details is not None else _count(self.timings, "cache_n")

    def count_output(self) -> tuple[int, TokenSource]:
        """Output tokens, and how we know: the server's count, else token ids, else one per chunk."""
        counted = _count(self.usage, "completion_tokens")
        if counted is not None:
            return counted, "usage"
        if self.num_token_ids:
            return self.num_token_ids, "token_ids"
        return len(self.arrivals_s), "chunks"


def _says_something(delta: ReplyDelta) -> bool:
    """False for the chunk that only opens a chat answer (`role`)."""
    return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class _Inference(msgspec.Struct):
    """An answer of /api/v1/inference."""

    metadata: dict[str, Any] = {}


def _metadata(body: bytes) -> dict[str, Any]:
    """It names counts as usage does."""
    try:
        return msgspec.json.decode(body, type=_Inference).metadata
    except UNREADABLE:
        return {}


def _count(counts: Any, name: str) -> int | None:
    found = counts.get(name) if isinstance(counts, dict) else None
    return found if isinstance(found, int) else None
