"""`AnswerReading`: how the text of an answer becomes content, thoughts and calls, where it is more than content.

Does: say how, per request; read one choice (`ChoiceReader`) and count its tokens of thought. Does not: put parts on the wire
(`parsed_answer.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tonle.chat_formats.chat_format import ChatFormat, ThinkingTags
from tonle.chat_formats.parts import CallArguments, CallBegins, ContentText, Part, ReasoningText
from tonle.engine.request import Delta
from tonle.replica.read_tools import ToolUse


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """How all choices of a request are read."""

    format: ChatFormat
    use: ToolUse | None = None  # None: calls are content
    thinking: ThinkingTags | None = None  # None: thoughts are content
    is_open: bool = False  # the prompt ends inside of a thought
    thinking_end: Sequence[int] = ()  # the tokens of the tag that closes a thought
    shows_reasoning: bool = True
    unwanted: re.Pattern[str] | None = None  # special tokens that the text has in it for the format's sake

    def choice(self) -> ChoiceReader:
        return ChoiceReader(self)


class ChoiceReader:
    """Reads one choice, delta by delta."""

    def __init__(self, reading: AnswerReading) -> None:
        use = reading.use
        self._parser = reading.format.parser(
            [] if use is None else use.tools, thinking=reading.thinking, is_open=reading.is_open
        )
        self._reading = reading
        self._max_calls = 1 if use is not None and not use.choice.parallel else None
        self._thoughts = _ThoughtCounter(reading) if reading.thinking is not None else None
        self.num_calls = 0

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._thoughts is None else self._thoughts.num_tokens

    def read(self, delta: Delta) -> list[Part]:
        """The parts that are certain now; all that is left with the last delta."""
        text, unwanted = delta.text, self._reading.unwanted
        if unwanted is not None:
            text = unwanted.sub("", text)
        parts = self._parser.push(text) if text else []
        if delta.finish_reason is not None:
            parts += self._parser.finish()
        if self._thoughts is not None:
            self._thoughts.read(delta.tokens, parts)
        return [kept for part in parts if (kept := self._kept(part)) is not None]

    def _kept(self, part: Part) -> Part | None:
        """`part`, unless the caller did not ask for it."""
        if isinstance(part, CallBegins | CallArguments):
            if self._max_calls is not None and part.index >= self._max_calls:
                return None
            self.num_calls = max(self.num_calls, part.index + 1)
            return part
        if isinstance(part, ReasoningText):
            return part if self._reading.shows_reasoning else None
        return part


class _ThoughtCounter:
    """How many tokens a choice has thought: those up to the tokens that close a thought."""

    def __init__(self, reading: AnswerReading) -> None:
        self.num_tokens = 0
        self._end = list(reading.thinking_end)
        self._is_open = reading.is_open
        self._waiting: list[int] = []  # tokens that came before the first part
        self._tail: list[int] = []
        self._is_closed = False

    def read(self, tokens: list[int], parts: list[Part]) -> None:
        if self._is_closed:
            return
        if not self._is_open:
            if not parts:
                self._waiting += tokens  # may be the beginning of the tag
                return
            if not isinstance(parts[0], ReasoningText):
                self._is_closed = True
                return
            self._is_open = True
            tokens, self._waiting = self._waiting + tokens, []
        place = _find(self._tail + tokens, self._end)
        if place is not None:
            self.num_tokens += place - len(self._tail)
            self._is_closed = True
            return
        thought = sum(len(part.text) for part in parts if isinstance(part, ReasoningText))
        others = sum(len(part.text) for part in parts if isinstance(part, ContentText | CallArguments))
        if others:  # closed by other tokens than expected: they are shared out by length
            self.num_tokens += len(tokens) * thought // (thought + others)
            self._is_closed = True
            return
        self.num_tokens += len(tokens)
        self._tail = (self._tail + tokens)[-len(self._end) :] if self._end else []


def _find(tokens: list[int], wanted: list[int]) -> int | None:
    """Behind the first place where `wanted` stands in `tokens`."""
    if not wanted:
        return None
    for start in range(len(tokens) - len(wanted) + 1):
        if tokens[start : start + len(wanted)] == wanted:
            return start + len(wanted)
    return None
