"""FunctionGemma: `<start_function_call>call:weather{city:<escape>Paris<escape>,days:3}<end_function_call>`.

Keys have no quotes, and strings have `<escape>` for quotes; they become JSON as they come. A call that a grammar binds has a JSON
object in its braces, `call:weather{"city": "Paris"}`, so that the schema can hold.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tonle.chat_formats.answer_parser import CallReader
from tonle.chat_formats.base_format import CallReaderFormat
from tonle.chat_formats.chat_format import Tool, ToolChoice
from tonle.chat_formats.grammar_text import LEAD, arguments, literal, most_calls, one_of, repeated, tag, text_with_calls
from tonle.chat_formats.json_calls import skip_tag
from tonle.chat_formats.json_text import NotJSONError, read_object_rest
from tonle.chat_formats.members import literal_value
from tonle.chat_formats.part_list import PartList
from tonle.chat_formats.text_reader import Reading, TextReader

_START, _END, _QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"
_NAME = re.compile(r"[\w.-]*")
_KEY = re.compile(r"[^:,{}\[\]<]*")
_BARE = re.compile(r"[^,}\]<]*")
_QUOTED = re.compile(r"[^<]*")
_MAX_DEPTH = 50


class FunctionGemma(CallReaderFormat):
    name = "functiongemma"
    tags = (_START, _END, _QUOTE)

    def write_calls(self, calls: Sequence[tuple[str, Any]]) -> str:
        return "".join(f"{_START}call:{name}{_written(values)}{_END}" for name, values in calls)

    def _call_reader(self, tools: Sequence[Tool]) -> CallReader:
        return _Calls({tool.name for tool in tools})

    def _calls_alone(self, tools: Sequence[Tool], choice: ToolChoice) -> str:
        calls = repeated("one", "", most_calls(choice))
        one = f"one: {tag(_START, self._special_tokens)} call"
        return "\n".join([f"start: LEAD {calls}", one, self._call(tools, all_bound=True), LEAD])

    def _calls_in_text(self, tools: Sequence[Tool], choice: ToolChoice) -> str:
        return f"{text_with_calls(_START, self._special_tokens, choice)}\n{self._call(tools, all_bound=False)}"

    def _call(self, tools: Sequence[Tool], *, all_bound: bool) -> str:
        """Rules for what follows the first tag."""
        end = tag(_END, self._special_tokens)
        cases = [
            f"{literal(f'call:{tool.name}')} {arguments(tool, is_bound=all_bound or tool.strict)} {end}"
            for tool in tools
        ]
        return one_of("call", cases)


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    return f"{_QUOTE}{value}{_QUOTE}" if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True, slots=True)
class _Calls:
    """A `CallReader`."""

    names: Collection[str]

    @property
    def openers(self) -> tuple[str, ...]:
        return (_START,)

    def read(self, opener: str, reader: TextReader, parts: PartList) -> Reading[bool]:
        yield from reader.skip_space()
        if (yield from reader.take_one_of(["call:"])) is None:
            return False
        name = yield from reader.take_all(_NAME)
        if name not in self.names or (yield from reader.skip_space()) not in ("{", ""):
            return False
        reader.release()
        parts.begin_call(name)
        if not (yield from reader.peek()):
            return True

        def add(piece: str) -> None:
            parts.arguments(piece)
            reader.release()

        try:
            yield from _read_braces(reader, add)
        except NotJSONError:
            reader.breaks_off()
            return True
        yield from skip_tag(_END, reader, parts)
        return True


def _read_braces(reader: TextReader, emit: Callable[[str], None], depth: int = 0) -> Reading[None]:
    """`{…}`. Raises `NotJSONError` where the text breaks off or is something else."""
    reader.take()
    if (yield from reader.skip_space()) == '"':
        yield from read_object_rest(reader, emit)
        return
    emit("{")
    separator = ""
    while (char := (yield from reader.skip_space())) != "}":
        if separator:
            if char != ",":
                raise NotJSONError
            reader.take()
            yield from reader.skip_space()
        key = yield from reader.take_all(_KEY)
        if (yield from reader.peek()) != ":":
            raise NotJSONError
        reader.take()
        emit(f"{separator}{json.dumps(key.strip(), ensure_ascii=False)}: ")
        yield from _read_value(reader, emit, depth)
        separator = ", "
    reader.take()
    emit("}")


def _read_list(reader: TextReader, emit: Callable[[str], None], depth: int) -> Reading[None]:
    emit(reader.take())
    separator = ""
    while (char := (yield from reader.skip_space())) != "]":
        if separator:
            if char != ",":
                raise NotJSONError
            reader.take()
        emit(separator)
        yield from _read_value(reader, emit, depth)
        separator = ", "
    emit(reader.take())


def _read_value(reader: TextReader, emit: Callable[[str], None], depth: int) -> Reading[None]:
    char = yield from reader.skip_space()
    if depth > _MAX_DEPTH:
        raise NotJSONError
    if char == "{":
        yield from _read_braces(reader, emit, depth + 1)
    elif char == "[":
        yield from _read_list(reader, emit, depth + 1)
    elif (yield from reader.take_one_of([_QUOTE])) is not None:
        yield from _read_quoted(reader, emit)
    else:
        written = yield from reader.take_all(_BARE)
        if not written or not (yield from reader.peek()):
            raise NotJSONError
        emit(json.dumps(literal_value(written), ensure_ascii=False))


def _read_quoted(reader: TextReader, emit: Callable[[str], None]) -> Reading[None]:
    """A string after its first quote."""
    emit('"')
    while (yield from reader.take_one_of([_QUOTE])) is None:
        if reader.breaks_off():
            raise NotJSONError
        emit(json.dumps(reader.take_run(_QUOTED) or reader.take(), ensure_ascii=False)[1:-1])
    emit('"')
