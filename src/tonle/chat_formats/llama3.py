"""Llama 3.1 to 3.3: a bare JSON object, `{"name": …, "parameters": {…}}`, maybe after `<|python_tag|>`.

Its templates take one call per message, so an answer that must call makes one. Several come with `; ` between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tonle.chat_formats.answer_parser import CallReader
from tonle.chat_formats.base_format import CallReaderFormat
from tonle.chat_formats.chat_format import Tool, ToolChoice
from tonle.chat_formats.grammar_text import LEAD, one_of
from tonle.chat_formats.json_calls import JSONCalls, bare_calls_in_text, object_rule, write_object

_PYTHON = "<|python_tag|>"
_KEY = "parameters"


class Llama3(CallReaderFormat):
    name = "llama3"
    tags = (_PYTHON,)

    def write_calls(self, calls: Sequence[tuple[str, Any]]) -> str:
        return "; ".join(write_object(*call, _KEY) for call in calls)

    def _call_reader(self, tools: Sequence[Tool]) -> CallReader:
        return JSONCalls.bare(tools, closers={_PYTHON: ""})

    def _calls_alone(self, tools: Sequence[Tool], choice: ToolChoice) -> str:
        objects = one_of("object", [object_rule(tool, _KEY) for tool in tools])
        return f"start: LEAD object\n{objects}\n{LEAD}"

    def _calls_in_text(self, tools: Sequence[Tool], choice: ToolChoice) -> str:
        return bare_calls_in_text(tools, choice, _KEY)
