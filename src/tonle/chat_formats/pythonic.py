"""A list of calls as Python writes them: `[weather(city="Paris", days=3), time()]`. Llama 3.2 and 4, Gemma 3 in some templates.

Values are Python's literals, and JSON's `true`, `false`, `null`; they come when they are whole. A call that a grammar binds has
one JSON object in its brackets, `[weather({"city": "Paris"})]`, so that the schema can hold.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tonle.chat_formats.answer_parser import CallReader
from tonle.chat_formats.base_format import CallReaderFormat
from tonle.chat_formats.chat_format import Tool, ToolChoice
from tonle.chat_formats.grammar_text import ANY_TEXT, LEAD, arguments, literal, most_calls, one_of, pattern, repeated
from tonle.chat_formats.json_calls import read_named_call, skip_tag
from tonle.chat_formats.members import Members, literal_value
from tonle.chat_formats.part_list import PartList
from tonle.chat_formats.text_reader import Reading, TextReader

_START, _END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[\w.-]*")
_WORD = re.compile(r"\w*")
_PLAIN = re.compile(r"[^\"'()\[\]{},]*")
_CLOSES = {"(": ")", "[": "]", "{": "}"}


class Pythonic(CallReaderFormat):
    name = "pythonic"
    tags = (_START, _END)

    def write_calls(self, calls: Sequence[tuple[str, Any]]) -> str:
        return f"[{', '.join(_written(*call) for call in calls)}]"

    def _call_reader(self, tools: Sequence[Tool]) -> CallReader:
        return _Calls({tool.name for tool in tools})

    def _calls_alone(self, tools: Sequence[Tool], choice: ToolChoice) -> str:
        cases = [f'{literal(f"{tool.name}(")} {arguments(tool)} ")"' for tool in tools]
        calls = repeated("call", literal(", "), most_calls(choice))
        return "\n".join([f'start: LEAD "[" {calls} "]"', one_of("call", cases), LEAD])

    def _calls_in_text(self, tools: Sequence[Tool], choice: ToolChoice) -> str:
        strict = [tool for tool in tools if tool.strict]
        begins = [
            rf"before_{number}[lazy]: TEXT /[\[,][ \t\r\n]*{pattern(tool.name)}\(/"
            for number, tool in enumerate(strict)
        ]
        calls = [f'before_{number} {arguments(tool)} ")"' for number, tool in enumerate(strict)]
        start = "call* TEXT" if choice.parallel else 'TEXT | call "]"'
        return "\n".join([f"start: {start}", one_of("call", calls), *begins, ANY_TEXT])


def _written(name: str, values: Any) -> str:
    if not isinstance(values, dict):
        return f"{name}()"
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"


@dataclass(frozen=True, slots=True)
class _Calls:
    """A `CallReader`."""

    names: Collection[str]

    @property
    def openers(self) -> tuple[str, ...]:
        return (_START, "[")

    def read(self, opener: str, reader: TextReader, parts: PartList) -> Reading[bool]:
        if opener == _START:
            if (yield from reader.skip_space()) != "[":
                return False
            reader.take()
        if not (yield from self._read_call(reader, parts)):
            return False
        while (yield from reader.skip_space()) == ",":
            reader.take()
            if not (yield from self._read_call(reader, parts)):
                break
        yield from skip_tag("]", reader, parts)
        if opener == _START:
            yield from skip_tag(_END, reader, parts)
        return True

    def _read_call(self, reader: TextReader, parts: PartList) -> Reading[bool]:
        """`name(…)`. False: it is none, and the reader holds what was read."""
        yield from reader.skip_space()
        name = yield from reader.take_all(_NAME)
        if name not in self.names or (yield from reader.skip_space()) != "(":
            return False
        reader.take()
        if (yield from reader.skip_space()) == "{":
            if not (yield from read_named_call(name, reader, parts)):
                return False
        else:
            yield from _read_members(Members(name, parts), reader)
        yield from skip_tag(")", reader, parts)
        return True


def _read_members(members: Members, reader: TextReader) -> Reading[None]:
    """`key=value, …` up to the bracket that closes the call."""
    reader.release()
    while True:
        yield from reader.skip_space()
        key = yield from reader.take_all(_WORD)
        if not key or (yield from reader.skip_space()) != "=":
            if not reader.breaks_off():
                members.end()
            return
        reader.take()
        written = yield from _read_written(reader)
        char = yield from reader.peek()
        if reader.breaks_off():
            return
        members.add(key, literal_value(written))
        reader.release()
        if char != ",":
            members.end()
            return
        reader.take()


def _read_written(reader: TextReader) -> Reading[str]:
    """A value as it is written, up to the comma or the bracket after it."""
    pieces: list[str] = []
    closers: list[str] = []  # of the brackets that are open
    while True:
        pieces.append((yield from reader.take_all(_PLAIN)))
        char = yield from reader.peek()
        if not char or (not closers and char in ",)]}"):
            return "".join(pieces)
        if char in "\"'":
            pieces.append((yield from _read_quoted(reader)))
            continue
        if char in _CLOSES:
            closers.append(_CLOSES[char])
        elif char == closers[-1]:
            closers.pop()
        pieces.append(reader.take())


def _read_quoted(reader: TextReader) -> Reading[str]:
    quote = reader.take()
    inside = re.compile(rf"(?:[^{quote}\\])*")
    pieces = [quote]
    while char := (yield from reader.peek()):
        if char == quote:
            pieces.append(reader.take())
            break
        if char == "\\":
            pieces.append(reader.take())
            if not (yield from reader.peek()):
                break
            pieces.append(reader.take())
        else:
            pieces.append((yield from reader.take_all(inside)))
    return "".join(pieces)
