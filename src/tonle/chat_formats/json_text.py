"""JSON as it comes: where a value ends, and what a string of it says.

Does: read values from a `TextReader`, in pieces. Does not: check all of JSON's rules. Strings, escapes and brackets are followed
exactly, so the end of a value is found; a comma too many is the caller's to see.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tonle.chat_formats.text_reader import Reading, TextReader

_OUTSIDE = re.compile(r'[^"{}\[\]]*')  # of strings, up to what matters
_INSIDE = re.compile(r'[^"\\]*')  # of a string
_BARE = re.compile(r"[-+.\w]*")  # a number, true, false, null
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSES = {"{": "}", "[": "]"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "\\": "\\", "/": "/"}


class NotJSONError(Exception):
    """The text is not what was to be read. What was taken is still held."""


def ignore(_piece: str) -> None:
    """For values that are not wanted."""


def read_value(reader: TextReader, emit: Callable[[str], None]) -> Reading[None]:
    """One value, as it is written, in pieces. Raises `NotJSONError`; also where the text ends too soon."""
    char = yield from reader.peek()
    if char in _CLOSES:
        yield from _read_nested(reader, emit, [])
    elif char == '"':
        emit(reader.take())
        yield from read_string(reader, emit)
        emit('"')
    else:
        yield from _read_bare(reader, emit)


def read_object_rest(reader: TextReader, emit: Callable[[str], None]) -> Reading[None]:
    """An object whose first bracket is taken and not emitted. Raises `NotJSONError`."""
    emit("{")
    yield from _read_nested(reader, emit, ["{"])


def _read_nested(reader: TextReader, emit: Callable[[str], None], open_brackets: list[str]) -> Reading[None]:
    """An object or an array, in which these brackets are open already."""
    while True:
        emit(reader.take_run(_OUTSIDE))
        char = yield from reader.peek()
        if not char:
            raise NotJSONError
        if char not in '"{}[]':
            continue  # more came
        if char in "}]" and char != _CLOSES[open_brackets[-1]]:
            raise NotJSONError
        emit(reader.take())
        if char == '"':
            yield from read_string(reader, emit)
            emit('"')
        elif char in "{[":
            open_brackets.append(char)
        else:
            open_brackets.pop()
            if not open_brackets:
                return


def read_string(reader: TextReader, emit: Callable[[str], None]) -> Reading[None]:
    """The rest of a string after its first quote, as it is written; the last quote is taken, not emitted."""
    while True:
        emit(reader.take_run(_INSIDE))
        char = yield from reader.peek()
        if not char:
            raise NotJSONError
        if char == '"':
            reader.take()
            return
        if char == "\\":
            emit(reader.take())
            if not (yield from reader.peek()):
                raise NotJSONError
            emit(reader.take())


def read_decoded(reader: TextReader, emit: Callable[[str], None]) -> Reading[None]:
    """As `read_string`, but what the string says: `\\n` is a new line."""
    half = ""  # of a character that is written as two escapes
    while True:
        text, char = reader.take_run(_INSIDE), ""
        if not text:
            char = yield from reader.peek()
            if not char:
                raise NotJSONError
            if char not in '"\\':
                continue  # more came
            reader.take()
            text = (yield from _read_escape(reader)) if char == "\\" else ""
        text, half = half + text, ""
        if len(text) == 1 and "\ud800" <= text <= "\udbff":
            half = text
            continue
        emit(_joined(text))
        if char == '"':
            return


def _joined(text: str) -> str:
    """With the halves of characters put together; what has no other half is U+FFFD."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _read_escape(reader: TextReader) -> Reading[str]:
    """What follows a backslash."""
    if not (yield from reader.peek()):
        raise NotJSONError
    char = reader.take()
    if char != "u":
        return _ESCAPES.get(char, char)
    digits = ""
    while len(digits) < 4:
        if (yield from reader.peek()) not in _HEX:
            raise NotJSONError
        digits += reader.take()
    return chr(int(digits, 16))


def _read_bare(reader: TextReader, emit: Callable[[str], None]) -> Reading[None]:
    some = False
    while True:
        run = reader.take_run(_BARE)
        some = some or bool(run)
        emit(run)
        char = yield from reader.peek()
        if not _BARE.fullmatch(char) or not char:
            if not some:
                raise NotJSONError
            return
