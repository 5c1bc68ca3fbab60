"""`PartList`: the parts of an answer as they are found.

Does: number the calls, join neighbours, keep whitespace back until it is known whether text or a call follows. Does not: read.
"""

from __future__ import annotations

from collections.abc import Callable

from tonle.chat_formats.parts import CallArguments, CallBegins, ContentText, Part, ReasoningText


class PartList:
    def __init__(self, *, with_calls: bool) -> None:
        """`with_calls`: there may be some."""
        self._with_calls = with_calls
        self._parts: list[Part] = []
        self._pieces: list[str] = []  # of the part that is being joined
        self._make: Callable[[str], Part] = ContentText  # that part
        self._space = ""  # the end of the content so far: not content if calls follow
        self._thought_space = ""  # the end of the thought so far
        self.num_calls = 0

    def content(self, text: str) -> None:
        if not self._with_calls:
            self._add(ContentText, text)
            return
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        self._add(ContentText, kept)

    def reasoning(self, text: str) -> None:
        text = self._thought_space + text
        kept = text.rstrip()
        self._thought_space = text[len(kept) :]
        self._add(ReasoningText, kept)

    def begin_call(self, name: str) -> None:
        self._close()
        self._parts.append(CallBegins(self.num_calls, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Of the call that was begun last."""
        self._add(self._make_arguments, text)

    def drain(self, *, is_last: bool = False) -> list[Part]:
        """The parts since the last time. `is_last`: no more come, so whitespace at the end of the content is content."""
        if is_last and not self.num_calls:
            self._add(ContentText, self._space)
        self._close()
        parts, self._parts = self._parts, []
        return parts

    def _make_arguments(self, text: str) -> Part:
        return CallArguments(self.num_calls - 1, text)

    def _add(self, make: Callable[[str], Part], text: str) -> None:
        if not text:
            return
        if make != self._make:
            self._close()
            self._make = make
        self._pieces.append(text)

    def _close(self) -> None:
        if self._pieces:
            self._parts.append(self._make("".join(self._pieces)))
            self._pieces.clear()
