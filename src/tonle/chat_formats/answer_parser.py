"""`AnswerParser`: reads thoughts, content and calls out of an answer while it grows.

Does: thoughts first, then content, with the calls in it. Does not: know how a call is written (see the formats' `CallReader`s).

Thoughts: a thought is what stands between the tags, without the whitespace around it; if the prompt ends inside of one, all up
to the closing tag is thought. A thought that is never closed goes on to the end. The first may open late, after some content;
there is one thought in an answer, and tags after it are content.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from tonle.chat_formats.chat_format import ThinkingTags
from tonle.chat_formats.part_list import PartList
from tonle.chat_formats.part_parser import PartParser
from tonle.chat_formats.text_reader import Reading, TextReader


class CallReader(Protocol):
    @property
    def openers(self) -> tuple[str, ...]:
        """With which calls may begin."""

    def read(self, opener: str, reader: TextReader, parts: PartList) -> Reading[bool]:
        """Calls, after this opener, which is held. False: it is no call, and what the reader holds is content."""


class AnswerParser(PartParser):
    def __init__(self, calls: CallReader | None, thinking: ThinkingTags | None, *, is_open: bool) -> None:
        """No `calls`: they are content."""
        self._calls = calls
        self._thinking = thinking
        super().__init__(with_calls=calls is not None, is_open=is_open)

    def _read(self, is_open: bool) -> Reading[None]:
        if self._thinking is not None:
            if not is_open:
                is_open = yield from self._read_content(self._thinking)
            if is_open:
                yield from self._read_thought(self._thinking)
        yield from self._read_content(None)

    def _read_thought(self, tags: ThinkingTags) -> Reading[None]:
        """From after the opening tag to after the closing tag."""
        reader, parts = self._reader, self._parts
        plain = _without([tags.end])
        yield from reader.skip_space()
        if (yield from reader.take_one_of([tags.start])) is not None:  # a model may repeat what its prompt ends with
            yield from reader.skip_space()
            reader.release()
        else:
            parts.reasoning(reader.release().lstrip())
        while True:
            reader.take_run(plain)
            parts.reasoning(reader.release())
            if not (yield from reader.peek()):
                return
            if (yield from reader.take_one_of([tags.end])) is not None:
                break
            reader.take()
        yield from reader.skip_space()
        reader.release()

    def _read_content(self, thinking: ThinkingTags | None) -> Reading[bool]:
        """Up to where a thought begins, if one may; returns whether one does."""
        reader, parts = self._reader, self._parts
        openers = [*(self._calls.openers if self._calls else ()), *([thinking.start] if thinking else ())]
        plain = _without(openers)
        if thinking is not None:
            yield from reader.skip_space()  # held: before a thought it is no content
        while True:
            if reader.take_run(plain):
                parts.content(reader.release())
            if not (yield from reader.peek()):
                parts.content(reader.release())
                return False
            found = yield from reader.take_one_of(openers)
            if found is None:
                reader.take()
                parts.content(reader.release())
            elif thinking is not None and found == thinking.start:
                reader.release()
                return True
            elif self._calls is not None and not (yield from self._calls.read(found, reader, parts)):
                parts.content(reader.release())


def _without(texts: Sequence[str]) -> re.Pattern[str]:
    """Text in which none of these begins."""
    firsts = "".join(sorted({re.escape(text[0]) for text in texts}))
    return re.compile(f"[^{firsts}]*" if firsts else ".*", re.DOTALL)
