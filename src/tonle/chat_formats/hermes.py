"""Hermes and Qwen: `<tool_call>`, a JSON object on a line of its own, `</tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tonle.chat_formats.answer_parser import CallReader
from tonle.chat_formats.base_format import CallReaderFormat
from tonle.chat_formats.chat_format import Tool, ToolChoice
from tonle.chat_formats.grammar_text import LEAD, literal, most_calls, one_of, repeated, tag, text_with_calls
from tonle.chat_formats.json_calls import JSONCalls, object_rule, write_object

_START, _END = "<tool_call>", "</tool_call>"


class Hermes(CallReaderFormat):
    name = "hermes"
    tags = (_START, _END)

    def write_calls(self, calls: Sequence[tuple[str, Any]]) -> str:
        return "\n".join(f"{_START}\n{write_object(*call)}\n{_END}" for call in calls)

    def _call_reader(self, tools: Sequence[Tool]) -> CallReader:
        return JSONCalls(names={tool.name for tool in tools}, closers={_START: _END})

    def _calls_alone(self, tools: Sequence[Tool], choice: ToolChoice) -> str:
        calls = repeated("call", literal("\n"), most_calls(choice))
        return "\n".join([
            f"start: LEAD {calls}",
            f"call: {tag(_START, self._special_tokens)} body",
            self._body(one_of("object", [object_rule(tool) for tool in tools])),
            LEAD,
        ])  # fmt: skip

    def _calls_in_text(self, tools: Sequence[Tool], choice: ToolChoice) -> str:
        objects = one_of("object", [object_rule(tool, is_bound=tool.strict) for tool in tools])
        return "\n".join([text_with_calls(_START, self._special_tokens, choice), "call: body", self._body(objects)])

    def _body(self, objects: str) -> str:
        """Rules for what follows the first tag."""
        return f'body: "\\n" object "\\n" {tag(_END, self._special_tokens)}\n{objects}'
