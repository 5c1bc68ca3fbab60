"""`StreamedAnswer`: reads one server-sent event stream as its bytes arrive, and keeps moments and counts.

Does: split events, note when a chunk brought text or token ids, pick up usage, finish reason and errors.
Does not: keep the text, read the clock or touch sockets. `feed` runs once per network read: the client's hot path.

Every `data:` line of an OpenAI stream is one JSON document, so lines are enough: no multi-line events are put together.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tonle.bench.measure import TokenSource

MAX_MESSAGE_CHARS = 300


class _Delta(msgspec.Struct, gc=False):
    content: str | list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None  # completions
    delta: _Delta | None = None  # chat
    token_ids: list[int] | None = None  # servers that send them: tokens may be ahead of their text
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Timings(msgspec.Struct, gc=False):
    cache_n: int | None = None  # llama-server says here what it took from its cache


class _Chunk(msgspec.Struct, gc=False):
    """The fields we look at; all others are skipped without being built."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class StreamedAnswer:
    """Owns what one answer said, and when."""

    __slots__ = (
        "_tail", "arrivals_s", "done", "failure", "finish_reason", "last_s", "num_token_ids", "timings", "usage",
    )  # fmt: skip

    def __init__(self) -> None:
        self.arrivals_s: list[float] = []  # chunks with text or token ids
        self.last_s: float | None = None  # last chunk with a choice
        self.num_token_ids = 0
        self.usage: _Usage | None = None
        self.timings: _Timings | None = None
        self.finish_reason: str | None = None
        self.done = False  # [DONE] was seen
        self.failure: str | None = None  # the first thing that was wrong, "kind: detail"
        self._tail = b""  # a line whose end has not arrived

    def feed(self, data: bytes, now_s: float) -> None:
        """Take bytes that arrived at `now_s`. Never raises: what cannot be read becomes `failure`."""
        lines = (self._tail + data).split(b"\n") if self._tail else data.split(b"\n")
        self._tail = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:], now_s)

    def _take(self, payload: bytes, now_s: float) -> None:
        try:
            chunk = _decode(payload)
        except msgspec.MsgspecError as error:
            self._take_other(payload.strip(), error)
            return
        if chunk.choices:
            choice = chunk.choices[0]
            self.last_s = now_s
            if choice.text or choice.token_ids or (choice.delta is not None and _says_something(choice.delta)):
                self.arrivals_s.append(now_s)
            if choice.token_ids:
                self.num_token_ids += len(choice.token_ids)
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
        if chunk.usage is not None:
            self.usage = chunk.usage
        if chunk.timings is not None:
            self.timings = chunk.timings
        if chunk.error is not None and self.failure is None:
            self.failure = f"error in stream: {error_text(chunk.error)}"

    def _take_other(self, payload: bytes, error: msgspec.MsgspecError) -> None:
        if payload == b"[DONE]":
            self.done = True
        elif self.failure is None:
            self.failure = f"unreadable answer: {error}"

    @property
    def complete(self) -> bool:
        """The server said that this is all."""
        return self.done or self.finish_reason is not None

    @property
    def prompt_tokens(self) -> int | None:
        return None if self.usage is None else self.usage.prompt_tokens

    @property
    def cached_tokens(self) -> int | None:
        if self.usage is not None and self.usage.prompt_tokens_details is not None:
            return self.usage.prompt_tokens_details.cached_tokens
        return None if self.timings is None else self.timings.cache_n

    def count_output(self) -> tuple[int, TokenSource]:
        """Output tokens, and how we know: the server's count, else token ids, else one per chunk."""
        if self.usage is not None and self.usage.completion_tokens is not None:
            return self.usage.completion_tokens, "usage"
        if self.num_token_ids:
            return self.num_token_ids, "token_ids"
        return len(self.arrivals_s), "chunks"


def _says_something(delta: _Delta) -> bool:
    """False for the chunk that only opens a chat answer (`role`)."""
    return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


def error_text(error: Any) -> str:
    """The message inside an OpenAI-style error object, or whatever stands in its place, as one printable line."""
    if isinstance(error, dict):
        for name in ("message", "detail", "error"):
            if error.get(name):
                return error_text(error[name])
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in str(error)).split())
    return text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + "…"
