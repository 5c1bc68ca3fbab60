"""Phi-4-mini and Granite 3: a tag, then a JSON list of calls. Phi-4 also with the word `functools` for a tag.

Phi closes the list with a tag of its own, Granite with the end of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tonle.chat_formats.answer_parser import CallReader
from tonle.chat_formats.base_format import CallReaderFormat
from tonle.chat_formats.chat_format import Tool, ToolChoice
from tonle.chat_formats.grammar_text import LEAD, literal, most_calls, one_of, repeated, tag, text_with_calls
from tonle.chat_formats.json_calls import JSONCalls, object_rule, write_object

_START, _END = "<|tool_call|>", "<|/tool_call|>"
_WORD = "functools["


class Phi4(CallReaderFormat):
    name = "phi4"
    tags = (_START, _END)

    @property
    def _before(self) -> list[str]:
        """What opens a list: a tag may be among these texts."""
        return [_WORD] if _WORD in self._template else [_START, "["]

    @property
    def _after(self) -> list[str]:
        return ["]"] if _WORD in self._template or _START in self._template else ["]", _END]

    def write_calls(self, calls: Sequence[tuple[str, Any]]) -> str:
        objects = ", ".join(write_object(*call) for call in calls)
        return "".join([*self._before, objects, *self._after])

    def _call_reader(self, tools: Sequence[Tool]) -> CallReader:
        return JSONCalls(names={tool.name for tool in tools}, closers={_START: _END, _WORD: ""})

    def _calls_alone(self, tools: Sequence[Tool], choice: ToolChoice) -> str:
        objects = one_of("object", [object_rule(tool) for tool in tools])
        return f"start: LEAD {self._tags(self._before)} {self._list(choice)}\n{objects}\n{LEAD}"

    def _calls_in_text(self, tools: Sequence[Tool], choice: ToolChoice) -> str:
        objects = one_of("object", [object_rule(tool, is_bound=tool.strict) for tool in tools])
        trigger, *others = self._before
        call = f"call: {self._tags(others)} {self._list(choice)}"
        return "\n".join([text_with_calls(trigger, self._special_tokens, choice), call, objects])

    def _list(self, choice: ToolChoice) -> str:
        """After its first bracket."""
        return f"{repeated('object', literal(', '), most_calls(choice))} {self._tags(self._after)}"

    def _tags(self, texts: Sequence[str]) -> str:
        return " ".join(tag(text, self._special_tokens) for text in texts)
