"""Tokens to code points, step by step: whole characters only, and never stuck on bytes that will never become one.

Does: join what tokens stand for and decode it as UTF-8 while it grows. Does not: hold back clusters or stop strings
(see `stream.py`).
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from typing import Protocol

from tonle.engine.text.pieces import Pieces

_REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 8  # tokens before the output that may change how it is decoded (a leading space)
_MAX_OPEN_TOKENS = 3  # a UTF-8 sequence lacks at most its last byte, so at most three tokens wait for one more


class Detokenizer(Protocol):
    @property
    def is_open(self) -> bool:
        """Whether the last tokens may have begun a character that further ones complete."""

    def push(self, tokens: Sequence[int]) -> str:
        """The characters these tokens complete."""

    def finish(self) -> str:
        """What is still open and yet text. An incomplete character is dropped."""


class ByteDetokenizer:
    """For tokenizers whose tokens are bytes: a lookup per token, and one decode per push of more than whole characters.

    Invalid bytes come out as U+FFFD, one per maximal invalid part, exactly as `bytes.decode(errors="replace")` does it.
    """

    def __init__(self, pieces: Pieces, *, drop_first_space: bool) -> None:
        self._pieces = pieces
        self._texts = pieces.texts
        self._drop_first_space = drop_first_space
        self._open = b""  # the start of a character, at most 3 bytes (or of a surrogate: Python waits for all of it)

    @property
    def is_open(self) -> bool:
        return bool(self._open)

    def push(self, tokens: Sequence[int]) -> str:
        if len(tokens) == 1 and not self._open and not self._drop_first_space:
            whole = self._texts[tokens[0]]
            if whole is not None:
                return whole
        data = b"".join(map(self._pieces.__getitem__, tokens))
        if self._drop_first_space and data:
            self._drop_first_space = False
            data = data.removeprefix(b" ")
        if self._open:
            data = self._open + data
        text, used = utf_8_decode(data, "replace", False)
        self._open = data[used:]
        return text

    def finish(self) -> str:
        self._open = b""
        return ""


class WindowDetokenizer:
    """For any `decode`: decodes a short window again with each push and gives what the window gained.

    The window starts at the tokens given out last, so that what a decoder does between two tokens (a space, a merged
    mark) is done as in the whole text. While the window's text ends in U+FFFD, its last tokens may be a part of a
    character.
    """

    def __init__(self, decode: Callable[[list[int]], str], *, context: Sequence[int]) -> None:
        self._decode = decode
        self._window = list(context[-_CONTEXT_TOKENS:])
        self._num_given = len(self._window)  # tokens of the window whose text is out already

    @property
    def is_open(self) -> bool:
        return len(self._window) > self._num_given

    def push(self, tokens: Sequence[int]) -> str:
        given = ""
        for token in tokens:
            self._window.append(token)
            given += self._advance()
        return given

    def finish(self) -> str:
        text = self._gained(len(self._window)).rstrip(_REPLACEMENT)
        self._num_given = len(self._window)
        return text

    def _advance(self) -> str:
        end = len(self._window)
        gained = self._gained(end)
        if gained.endswith(_REPLACEMENT):
            end = max(self._num_given, end - _MAX_OPEN_TOKENS)
            gained = self._gained(end)
        if not gained:
            return ""
        # The tokens just given are the next window's context.
        self._window = self._window[self._num_given :]
        self._num_given = end - self._num_given
        return gained

    def _gained(self, end: int) -> str:
        """The text of the window's tokens up to `end` beyond what is out already."""
        return self._decode(self._window[:end])[len(self._decode(self._window[: self._num_given])) :]
