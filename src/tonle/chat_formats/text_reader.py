"""`TextReader`: text that comes in pieces, read as if all of it were there.

A reading is a generator: it yields where the text ends for now, and goes on when more has come. So what reads a format is
written in the order in which the format is written, and a cut in the middle of a tag needs no care anywhere.

Does: look at the next character, take characters, keep what was taken until it is known what it is. Does not: know any format.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import TypeVar

_T = TypeVar("_T")
Reading = Generator[None, None, _T]

_SPACE = re.compile(r"[ \t\r\n]*")


class TextReader:
    def __init__(self) -> None:
        self._text = ""  # what has come; before `_at` it is taken
        self._at = 0
        self._is_ended = False
        self._held: list[str] = []  # taken, but not known to be anything yet

    def push(self, text: str) -> None:
        self._text = self._text[self._at :] + text  # what is not taken is short: a part of a tag
        self._at = 0

    def end(self) -> None:
        """No more text comes."""
        self._is_ended = True

    def peek(self) -> Reading[str]:
        """The next character; "" after the last one."""
        while self._at == len(self._text):
            if self._is_ended:
                return ""
            yield
        return self._text[self._at]

    def take(self) -> str:
        """The character that `peek` returned. It is held."""
        char = self._text[self._at]
        self._at += 1
        self._held.append(char)
        return char

    def take_run(self, pattern: re.Pattern[str]) -> str:
        """As much of the text that is there as the pattern matches; it must match the empty text. It is held."""
        found = pattern.match(self._text, self._at)
        run = found[0] if found else ""
        self._at += len(run)
        if run:
            self._held.append(run)
        return run

    def put_back(self) -> None:
        """What is held, which was taken at once, is to be read again."""
        self._at -= len(self.release())

    def take_all(self, pattern: re.Pattern[str]) -> Reading[str]:
        """All that is of characters that the pattern repeats, also of text that is still to come."""
        pieces: list[str] = []
        while (yield from self.peek()) and (run := self.take_run(pattern)):
            pieces.append(run)
        return "".join(pieces)

    def release(self) -> str:
        """All that is held; nothing is held after that."""
        held = "".join(self._held)
        self._held.clear()
        return held

    def skip_space(self) -> Reading[str]:
        """Take all whitespace; returns what `peek` sees after it."""
        yield from self.take_all(_SPACE)
        return (yield from self.peek())

    def take_one_of(self, texts: Sequence[str]) -> Reading[str | None]:
        """Take the one of `texts` that comes next; None if none does, and nothing is taken.

        Of two that begin alike the longer is meant, if it comes.
        """
        size, found = 0, None  # how much has been looked at, and the longest that is there
        while texts := [text for text in texts if len(text) > size]:
            if size == len(self._text) - self._at:
                if self._is_ended:
                    break
                yield
                continue
            char = self._text[self._at + size]
            texts = [text for text in texts if text[size] == char]
            size += 1
            found = next((text for text in texts if len(text) == size), found)
        if found is not None:
            self._at += len(found)
            self._held.append(found)
        return found

    def take_tag(self, tag: str) -> Reading[bool]:
        """Take it if it comes; also the beginning of it, where the text breaks off inside of it."""
        return (yield from self.take_one_of([tag])) is not None or self.breaks_off()

    def breaks_off(self) -> bool:
        """Whether no more text comes. What is held is dropped then, and what is left: of a tag that was waited for."""
        if self._is_ended:
            self._at = len(self._text)
            self._held.clear()
        return self._is_ended
