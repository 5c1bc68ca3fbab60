"""`StreamedAnswer`: what one streamed answer brought, and when.

Does: note when a chunk brought text or token ids, pick up usage, finish reason and errors. Does not: decode events
(`protocol/replies.py`), keep the text, read the clock or touch sockets. `feed` runs once per network read: the client's hot path.
"""

from __future__ import annotations

from typing import Any

from tonle.bench.measure import TokenSource
from tonle.protocol.replies import EventReader, Reply, ReplyDelta, error_text


class StreamedAnswer:
    """Owns what one answer said, and when."""

    __slots__ = (
        "_error", "_events", "arrivals_s", "finish_reason", "last_s", "num_token_ids", "timings", "usage",
    )  # fmt: skip

    def __init__(self) -> None:
        self.arrivals_s: list[float] = []  # chunks with text or token ids
        self.last_s: float | None = None  # last chunk with a choice
        self.num_token_ids = 0
        self.usage: dict[str, Any] = {}
        self.timings: Any = None
        self.finish_reason: str | None = None
        self._error: Any = None  # sent inside the stream
        self._events = EventReader()

    def feed(self, data: bytes, now_s: float) -> None:
        """Take bytes that arrived at `now_s`. Never raises: what cannot be read becomes `failure`."""
        for reply in self._events.feed(data):
            self._take(reply, now_s)

    def finish(self, now_s: float) -> None:
        """No more bytes come. The last event counts even without the empty line after it."""
        for reply in self._events.finish():
            self._take(reply, now_s)

    def _take(self, reply: Reply, now_s: float) -> None:
        if reply.choices:
            choice = reply.choices[0]
            self.last_s = now_s
            if choice.text or choice.token_ids or (choice.delta is not None and _says_something(choice.delta)):
                self.arrivals_s.append(now_s)
            if choice.token_ids:
                self.num_token_ids += len(choice.token_ids)
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
        if reply.usage is not None:
            self.usage = reply.usage
        if reply.timings is not None:
            self.timings = reply.timings
        if reply.error is not None and self._error is None:
            self._error = reply.error

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
        return self.done or self.finish_reason is not None

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


def _count(counts: Any, name: str) -> int | None:
    found = counts.get(name) if isinstance(counts, dict) else None
    return found if isinstance(found, int) else None
