"""Mistral: `[TOOL_CALLS]`, then a JSON list of calls, or in newer models `name[ARGS]{…}` for each call."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tonle.chat_formats.answer_parser import CallReader
from tonle.chat_formats.base_format import CallReaderFormat
from tonle.chat_formats.chat_format import Tool, ToolChoice
from tonle.chat_formats.grammar_text import LEAD, arguments, literal, most_calls, one_of, repeated, tag, text_with_calls
from tonle.chat_formats.json_calls import JSONCalls, object_rule, read_named_call, write_object
from tonle.chat_formats.part_list import PartList
from tonle.chat_formats.text_reader import Reading, TextReader

_CALLS, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[\w.-]*")


class Mistral(CallReaderFormat):
    name = "mistral"
    tags = (_CALLS, _ID, _ARGUMENTS)
    call_id_chars = 9

    @property
    def _is_new(self) -> bool:
        return _ARGUMENTS in self._template

    def write_calls(self, calls: Sequence[tuple[str, Any]]) -> str:
        if self._is_new:
            return "".join(
                f"{_CALLS}{name}{_ARGUMENTS}{json.dumps(values, ensure_ascii=False)}" for name, values in calls
            )
        return f"{_CALLS}[{', '.join(write_object(*call) for call in calls)}]"

    def _call_reader(self, tools: Sequence[Tool]) -> CallReader:
        return _Calls({tool.name for tool in tools})

    def _calls_alone(self, tools: Sequence[Tool], choice: ToolChoice) -> str:
        start, most = tag(_CALLS, self._special_tokens), most_calls(choice)
        calls = f"{start} body" if not self._is_new else repeated("one", "", most)
        return "\n".join([f"start: LEAD {calls}", f"one: {start} body", self._body(tools, most, all_bound=True), LEAD])

    def _calls_in_text(self, tools: Sequence[Tool], choice: ToolChoice) -> str:
        body = self._body(tools, most_calls(choice), all_bound=False)
        return "\n".join([text_with_calls(_CALLS, self._special_tokens, choice), "call: body", body])

    def _body(self, tools: Sequence[Tool], most: int, *, all_bound: bool) -> str:
        """Rules for what follows the tag."""
        bound = [all_bound or tool.strict for tool in tools]
        if self._is_new:
            between = tag(_ARGUMENTS, self._special_tokens)
            cases = [
                f"{literal(tool.name)} {between} {arguments(tool, is_bound=is_bound)}"
                for tool, is_bound in zip(tools, bound, strict=True)
            ]
            return one_of("body", cases)
        objects = one_of(
            "object", [object_rule(tool, is_bound=is_bound) for tool, is_bound in zip(tools, bound, strict=True)]
        )
        return f'body: / ?/ "[" {repeated("object", literal(", "), most)} "]"\n{objects}'


@dataclass(frozen=True, slots=True)
class _Calls:
    """A `CallReader`."""

    names: Collection[str]

    @property
    def openers(self) -> tuple[str, ...]:
        return (_CALLS,)

    def read(self, opener: str, reader: TextReader, parts: PartList) -> Reading[bool]:
        if (yield from reader.skip_space()) in ("[", "{"):
            return (yield from JSONCalls(self.names, {_CALLS: ""}).read(opener, reader, parts))
        name = yield from reader.take_all(_NAME)
        if name not in self.names:
            return False
        if (yield from reader.take_one_of([_ID])) is not None:
            yield from reader.take_all(_NAME)
        yield from reader.take_one_of([_ARGUMENTS])
        return (yield from read_named_call(name, reader, parts))
