"""What the answers of chat and completions have in common.

Does: collect the deltas of a choice that is sent whole, say where a stream carries usage, encode events that differ in
their text alone. Does not: know either shape (`chat_answer.py`, `completion_answer.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from tonle.engine.request import Delta, TokenLogprob
from tonle.engine.text import Text
from tonle.protocol import sse
from tonle.protocol.answers import Answer
from tonle.protocol.openai import (
    ChatCompletion,
    Completion,
    FinishReason,
    SamplingFields,
    StreamOptions,
    WireUsage,
)

if TYPE_CHECKING:
    from tonle.replica.generate import Envelope
    from tonle.replica.submission import Submission

_MARK = "\x00text\x00"  # JSON escapes it: no model name, id or time holds its encoding

_encode = msgspec.json.Encoder().encode


class ChoiceDraft:
    """One choice of an answer that is sent whole, while it grows."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None
        self._last: Delta | None = None

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._tokens += delta.tokens
        if delta.logprobs is not None:
            self._logprobs = self._logprobs or []
            self._logprobs += delta.logprobs
        self._last = delta

    def delta(self) -> Delta:
        """All deltas as if they had come as one."""
        assert self._last is not None, "every choice ends with a delta"
        return Delta(
            index=self._last.index,
            text="".join(self._texts),
            tokens=self._tokens,
            logprobs=self._logprobs,
            finish_reason=self._last.finish_reason,
            stop_reason=self._last.stop_reason,
        )


class StreamUsage:
    """Where a stream carries usage, as its `stream_options` ask."""

    def __init__(self, options: StreamOptions | None, submission: Submission) -> None:
        self.at_end = options is not None and bool(options.include_usage)
        self.throughout = options is not None and bool(options.continuous_usage_stats)
        self._submission = submission

    def in_chunk(self) -> WireUsage | UnsetType | None:
        if self.throughout:
            return self._submission.wire_usage
        # OpenAI puts a null into every chunk of a stream that will end with the usage.
        return None if self.at_end else UNSET


class EventTemplate:
    """Events that differ in one text: what stands before and after it is encoded once."""

    __slots__ = ("_after", "_before")

    def __init__(self, chunk: Callable[[str], msgspec.Struct]) -> None:
        """`chunk` makes the event's body around a text."""
        self._before, self._after = sse.event(chunk(_MARK)).split(_encode(_MARK))

    def event(self, text: str) -> bytes:
        return self._before + _encode(text) + self._after


class AnswerFormat(ABC):
    """Turns deltas into wire bodies of one kind."""

    def __init__(self, request: SamplingFields, envelope: Envelope, submission: Submission, text: Text) -> None:
        self._envelope = envelope
        self._submission = submission
        self._text = text
        self._want_ids = bool(request.return_token_ids)
        self._usage = StreamUsage(request.stream_options, submission)
        self._drafts = [ChoiceDraft() for _ in range(submission.num_choices)]
        # Most events differ in nothing but their text: the rest is encoded once per choice.
        self._templates: list[EventTemplate] | None = None
        if request.stream and not self._want_ids and not self._usage.throughout and not submission.order.prompt_only:
            self._templates = [
                EventTemplate(partial(self._text_chunk, choice)) for choice in range(submission.num_choices)
            ]

    def note(self, answer: Answer, choice: int, delta: Delta, now_s: float) -> None:
        """Keep what is new in the record. Called before `events` or `add`, for each delta."""
        if delta.text:
            answer.add_text(choice, delta.text, now_s)

    def reason(self, choice: int, delta: Delta) -> FinishReason:
        """Why a choice ended; only with its last delta."""
        return wire_reason(delta)

    @abstractmethod
    def opening(self) -> bytes:
        """Events before the first delta's; called when it has come."""

    def events(self, choice: int, delta: Delta) -> bytes:
        """Empty if there is nothing to tell yet."""
        if self._templates is not None and delta.logprobs is None and delta.finish_reason is None:
            return self._templates[choice].event(delta.text) if delta.text else b""
        return self._other_events(choice, delta)

    def closing(self) -> bytes:
        """Events after the last delta's."""
        if not self._usage.at_end:
            return b""
        chunk = self._chunk([])
        chunk.usage = self._submission.wire_usage
        return sse.event(chunk)

    def add(self, choice: int, delta: Delta) -> None:
        """To an answer that is sent whole."""
        self._drafts[choice].add(delta)

    @abstractmethod
    def whole(self) -> ChatCompletion | Completion: ...

    @abstractmethod
    def _other_events(self, choice: int, delta: Delta) -> bytes:
        """Those with more than text."""

    @abstractmethod
    def _text_chunk(self, choice: int, text: str) -> msgspec.Struct: ...

    @abstractmethod
    def _chunk(self, choices: list[Any]) -> Any: ...


def wire_reason(delta: Delta) -> FinishReason:
    """Only for a choice's last delta. `Delivery` turns the engine's other reasons into errors."""
    assert delta.finish_reason in ("stop", "length")
    return delta.finish_reason
