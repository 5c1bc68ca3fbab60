"""Calls that are written as JSON: `{"name": …, "arguments": {…}}`, alone, in a list, between tags.

Does: read them, and hand on the arguments as they come, as the model wrote them. Does not: check arguments against a schema; a
grammar does that.

A call is told once its name is known and its arguments begin. What breaks before that was no call, and is content. `parameters`
is another name for `arguments`; a string that holds JSON is unwrapped; null, and no arguments at all between tags, are `{}`. The
keys may stand in any order; other keys are skipped.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tonle.chat_formats.chat_format import Tool, ToolChoice
from tonle.chat_formats.grammar_text import ANY_TEXT, LEAD, arguments, literal, one_of, pattern
from tonle.chat_formats.json_text import NotJSONError, ignore, read_decoded, read_string, read_value
from tonle.chat_formats.part_list import PartList
from tonle.chat_formats.text_reader import Reading, TextReader

_ARGUMENTS = ("arguments", "parameters")
_BLANK = r"[ \t\r\n]*"
_BARE = ("{", "[")


def write_object(name: str, values: Any, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: values}, ensure_ascii=False)


def object_rule(tool: Tool, key: str = "arguments", *, is_bound: bool = True) -> str:
    """Of a grammar: what `write_object` writes."""
    before = f'{{"name": {literal(tool.name)}, "{key}": '
    return f"{literal(before)} {arguments(tool, is_bound=is_bound)} {literal('}')}"


def bare_calls_in_text(tools: Sequence[Tool], choice: ToolChoice, key: str = "arguments") -> str:
    """A grammar: any text in which an object that begins with the name of a strict tool is a call of it."""
    strict = [tool for tool in tools if tool.strict]
    begins, calls = [], []
    for number, tool in enumerate(strict):
        words = rf'\{{{_BLANK}"name"{_BLANK}:{_BLANK}"{pattern(tool.name)}"'
        begins.append(f"before_{number}[lazy]: TEXT /{words}/")
        between = literal(f', "{key}": ')
        calls.append(f'before_{number} {between} {arguments(tool)} "}}"')
    start = "call* TEXT" if choice.parallel else "TEXT | call LEAD"
    return "\n".join([f"start: {start}", one_of("call", calls), *begins, ANY_TEXT, LEAD])


@dataclass(frozen=True, slots=True)
class JSONCalls:
    """A `CallReader`."""

    names: Collection[str]  # of the tools
    closers: Mapping[str, str]  # what may open calls, and what closes them again; "": nothing does
    is_bare: bool = False  # calls may stand in the text as they are
    # Without a tag, any object could be a call; it is one if its first key is one of these.
    first_keys: Collection[str] = ("name", "type", *_ARGUMENTS)
    separators: str = ",;"  # between calls

    @classmethod
    def bare(cls, tools: Sequence[Tool], closers: Mapping[str, str]) -> JSONCalls:
        names = {tool.name for tool in tools}
        if any(tool.strict for tool in tools):  # what the grammar of strict tools watches for
            return cls(names=names, closers=closers, is_bare=True, first_keys=("name",))
        return cls(names=names, closers=closers, is_bare=True)

    @property
    def openers(self) -> tuple[str, ...]:
        return (*self.closers, *(_BARE if self.is_bare else ()))

    def read(self, opener: str, reader: TextReader, parts: PartList) -> Reading[bool]:
        first_keys = self.first_keys if self.is_bare else None
        bracket = opener[-1]
        if bracket not in _BARE:
            bracket = yield from reader.skip_space()
            if bracket not in _BARE:
                return False
            reader.take()
        is_list = bracket == "["
        if is_list:
            if (yield from reader.skip_space()) != "{":
                return False
            reader.take()
        if not (yield from _Call(self.names, first_keys, reader, parts).read()):
            return False
        closers = ["]"] if is_list else []
        if closer := self.closers.get(opener):
            closers.append(closer)
        yield from self._read_more(first_keys, reader, parts)
        for closer in closers:
            yield from skip_tag(closer, reader, parts)
        parts.content(reader.release())
        return True

    def _read_more(self, first_keys: Collection[str] | None, reader: TextReader, parts: PartList) -> Reading[None]:
        """The calls after the first one. What the reader holds then is between the last call and what follows."""
        while True:
            char = yield from reader.skip_space()
            if char and char in self.separators:
                reader.take()
                char = yield from reader.skip_space()
            if char == "{":
                reader.take()
                if (yield from _Call(self.names, first_keys, reader, parts).read()):
                    continue
                parts.content(reader.release())
            return


def skip_tag(tag: str, reader: TextReader, parts: PartList) -> Reading[None]:
    """Take it if it comes, maybe after whitespace. A model may have forgotten it."""
    yield from reader.skip_space()
    is_there = yield from reader.take_tag(tag)
    text = reader.release()
    if not is_there:
        parts.content(text)


def read_named_call(name: str, reader: TextReader, parts: PartList) -> Reading[bool]:
    """A call whose name is known, and whose arguments, a JSON object, come next. False: they do not."""
    char = yield from reader.skip_space()
    if char not in ("{", ""):
        return False
    reader.release()
    parts.begin_call(name)

    def add(piece: str) -> None:
        parts.arguments(piece)
        reader.release()

    with contextlib.suppress(NotJSONError):  # it breaks off, or goes on as content
        yield from read_value(reader, add)
    return True


class _Call:
    """One object, after its `{`, which the reader holds."""

    def __init__(
        self, names: Collection[str], first_keys: Collection[str] | None, reader: TextReader, parts: PartList
    ) -> None:
        self._names = names
        self._first_keys = first_keys  # None: any
        self._reader = reader
        self._parts = parts
        self._name: str | None = None
        self._kept: list[str] = []  # arguments that came before the name
        self._has_arguments = False
        self._is_told = False

    def read(self) -> Reading[bool]:
        """False: it is no call, and the reader holds all that was read."""
        try:
            yield from self._read_object()
        except NotJSONError:
            if not (yield from self._reader.peek()) and self._name is not None:  # the answer breaks off here
                self._tell()
            if self._is_told and (text := self._reader.release()) and (yield from self._reader.peek()):
                self._parts.content(text)
            return self._is_told
        if not self._is_told:
            if self._first_keys is not None and not self._has_arguments:
                return False  # an object with a name, as many are
            self._tell()
            self._parts.arguments("{}")
        self._reader.release()
        return True

    def _read_object(self) -> Reading[None]:
        reader = self._reader
        is_first = True
        while (char := (yield from reader.skip_space())) != "}":
            if char != '"':
                raise NotJSONError
            key = yield from self._read_text()
            if is_first and self._first_keys is not None and key not in self._first_keys:
                raise NotJSONError
            is_first = False
            if (yield from reader.skip_space()) != ":":
                raise NotJSONError
            reader.take()
            yield from reader.skip_space()
            yield from self._read_member(key)
            if (char := (yield from reader.skip_space())) == ",":
                reader.take()
            elif char != "}":
                raise NotJSONError
        reader.take()
        if self._name is None:
            raise NotJSONError

    def _read_member(self, key: str) -> Reading[None]:
        """The value of this key."""
        if key == "name" and self._name is None:
            name = yield from self._read_text()
            if name not in self._names:
                raise NotJSONError
            self._name = name
            if self._kept:
                self._tell()
        elif key in _ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            yield from self._read_arguments()
        else:
            yield from read_value(self._reader, ignore)

    def _read_text(self) -> Reading[str]:
        """A string as it is written: no name of a tool needs an escape."""
        if (yield from self._reader.peek()) != '"':
            raise NotJSONError
        self._reader.take()
        pieces: list[str] = []
        yield from read_string(self._reader, pieces.append)
        return "".join(pieces)

    def _read_arguments(self) -> Reading[None]:
        char = yield from self._reader.peek()
        if char == "{":
            yield from read_value(self._reader, self._add)
        elif char == '"':
            self._reader.take()
            yield from read_decoded(self._reader, self._add_unwrapped)
        else:
            written: list[str] = []
            yield from read_value(self._reader, written.append)
            if "".join(written) != "null":
                raise NotJSONError

    def _add_unwrapped(self, piece: str) -> None:
        """Of arguments that are a string which holds JSON."""
        if not self._is_told and not self._kept:
            piece = piece.lstrip()
            if piece and piece[0] != "{":
                raise NotJSONError
        self._add(piece)

    def _add(self, piece: str) -> None:
        if not piece:
            return
        if self._name is None:
            self._kept.append(piece)
            return
        self._tell()
        self._parts.arguments(piece)
        self._reader.release()

    def _tell(self) -> None:
        """There is a call, with what has come of its arguments."""
        if self._is_told or self._name is None:
            return
        self._is_told = True
        self._parts.begin_call(self._name)
        self._parts.arguments("".join(self._kept))
        self._reader.release()
