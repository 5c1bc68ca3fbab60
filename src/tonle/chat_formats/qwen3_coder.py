"""Qwen3-Coder and Qwen3.5: `<tool_call>`, `<function=weather>`, `<parameter=city>` with its value on lines of its own.

A parameter that the schema says is a string comes as it is written, others when they are whole. A call that a grammar binds has
one JSON object in place of the parameters, so that the schema can hold.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tonle.chat_formats.answer_parser import CallReader
from tonle.chat_formats.base_format import CallReaderFormat
from tonle.chat_formats.chat_format import Tool, ToolChoice
from tonle.chat_formats.grammar_text import LEAD, arguments, literal, most_calls, one_of, repeated, tag, text_with_calls
from tonle.chat_formats.json_calls import read_named_call, skip_tag
from tonle.chat_formats.members import Members, literal_value
from tonle.chat_formats.part_list import PartList
from tonle.chat_formats.text_reader import Reading, TextReader

_START, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_ENDS = "<parameter=", ("\n</parameter>", "</parameter>")
_NAME = re.compile(r"[^<>\s]*")
_PLAIN = re.compile(r"[^<\n]*")


class Qwen3Coder(CallReaderFormat):
    name = "qwen3_coder"
    tags = (_START, _END)

    def write_calls(self, calls: Sequence[tuple[str, Any]]) -> str:
        return "\n".join(f"{_START}\n{_written(*call)}\n{_END}" for call in calls)

    def _call_reader(self, tools: Sequence[Tool]) -> CallReader:
        return _Calls({tool.name: tool for tool in tools})

    def _calls_alone(self, tools: Sequence[Tool], choice: ToolChoice) -> str:
        calls = repeated("one", literal("\n"), most_calls(choice))
        one = f"one: {tag(_START, self._special_tokens)} call"
        return "\n".join([f"start: LEAD {calls}", one, self._call(tools), LEAD])

    def _calls_in_text(self, tools: Sequence[Tool], choice: ToolChoice) -> str:
        strict = [tool for tool in tools if tool.strict]
        free = [literal(f"\n{_FUNCTION}{tool.name}>") for tool in tools if not tool.strict]
        call = one_of("call", [*self._cases(strict), *free])
        return f"{text_with_calls(_START, self._special_tokens, choice)}\n{call}"

    def _call(self, tools: Sequence[Tool]) -> str:
        return one_of("call", self._cases(tools))

    def _cases(self, tools: Sequence[Tool]) -> list[str]:
        """What follows the first tag, for each tool."""
        after = f"{literal(f'{chr(10)}{_FUNCTION_END}{chr(10)}')} {tag(_END, self._special_tokens)}"
        return [f"{literal(f'{chr(10)}{_FUNCTION}{tool.name}>{chr(10)}')} {arguments(tool)} {after}" for tool in tools]


def _written(name: str, values: Any) -> str:
    lines = [f"{_FUNCTION}{name}>"]
    for key, value in (values if isinstance(values, dict) else {}).items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines += [f"{_PARAMETER}{key}>", text, "</parameter>"]
    return "\n".join([*lines, _FUNCTION_END])


@dataclass(frozen=True, slots=True)
class _Calls:
    """A `CallReader`."""

    tools: Mapping[str, Tool]

    @property
    def openers(self) -> tuple[str, ...]:
        return (_START,)

    def read(self, opener: str, reader: TextReader, parts: PartList) -> Reading[bool]:
        yield from reader.skip_space()
        if (yield from reader.take_one_of([_FUNCTION])) is None:
            return False
        name = yield from reader.take_all(_NAME)
        if name not in self.tools or (yield from reader.peek()) != ">":
            return False
        reader.take()
        if (yield from reader.skip_space()) == "{":
            yield from read_named_call(name, reader, parts)
        else:
            yield from _read_parameters(self.tools[name], reader, parts)
        yield from skip_tag(_FUNCTION_END, reader, parts)
        yield from skip_tag(_END, reader, parts)
        return True


def _read_parameters(tool: Tool, reader: TextReader, parts: PartList) -> Reading[None]:
    members = Members(tool.name, parts)
    reader.release()
    while (yield from reader.take_one_of([_PARAMETER])) is not None:
        key = yield from reader.take_all(_NAME)
        yield from reader.take_one_of([">\n", ">"])
        if reader.breaks_off():
            return
        reader.release()
        if _is_string(tool, key):
            members.key(key)
            is_whole = yield from _read_string(members, reader)
        else:
            is_whole = yield from _read_other(key, members, reader)
        if not is_whole:
            return
        yield from reader.skip_space()
        reader.release()
    if not reader.breaks_off():
        members.end()


def _is_string(tool: Tool, key: str) -> bool:
    properties = tool.parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, dict) else None
    return isinstance(schema, dict) and schema.get("type") == "string"


def _read_string(members: Members, reader: TextReader) -> Reading[bool]:
    """Up to the closing tag. False: the answer breaks off before it."""
    members.piece('"')
    while (yield from reader.take_one_of(_PARAMETER_ENDS)) is None:
        if reader.breaks_off():
            return False
        members.piece(json.dumps(reader.take_run(_PLAIN) or reader.take(), ensure_ascii=False)[1:-1])
        reader.release()
    members.piece('"')
    return True


def _read_other(key: str, members: Members, reader: TextReader) -> Reading[bool]:
    pieces: list[str] = []
    while (yield from reader.take_one_of(_PARAMETER_ENDS)) is None:
        if reader.breaks_off():
            return False
        pieces.append(reader.take_run(_PLAIN) or reader.take())
        reader.release()
    members.add(key, literal_value("".join(pieces)))
    return True
