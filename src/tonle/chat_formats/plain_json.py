"""Plain JSON, for models whose template knows no tools: `{"name": …, "arguments": {…}}`, or a list of these.

The system prompt asks for it. Models like to put it into a block of code, which is taken off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tonle.chat_formats.answer_parser import CallReader
from tonle.chat_formats.base_format import CallReaderFormat
from tonle.chat_formats.chat_format import Tool, ToolChoice
from tonle.chat_formats.grammar_text import LEAD, literal, most_calls, one_of, repeated
from tonle.chat_formats.json_calls import JSONCalls, bare_calls_in_text, object_rule, write_object

BLOCKS: Mapping[str, str] = {"```json\n": "```", "```\n": "```"}


class PlainJSON(CallReaderFormat):
    name = "json"
    key = "arguments"
    blocks = BLOCKS  # what may stand around calls

    def write_calls(self, calls: Sequence[tuple[str, Any]]) -> str:
        written = [write_object(*call, self.key) for call in calls]
        return written[0] if len(written) == 1 else f"[{', '.join(written)}]"

    def _call_reader(self, tools: Sequence[Tool]) -> CallReader:
        return JSONCalls.bare(tools, closers=self.blocks)

    def _calls_alone(self, tools: Sequence[Tool], choice: ToolChoice) -> str:
        most = most_calls(choice)
        several = f' | "[" {repeated("object", literal(", "), most)} "]"' if most > 1 else ""
        return "\n".join([
            f"start: LEAD (object{several})",
            one_of("object", [object_rule(tool, self.key) for tool in tools]),
            LEAD,
        ])  # fmt: skip

    def _calls_in_text(self, tools: Sequence[Tool], choice: ToolChoice) -> str:
        return bare_calls_in_text(tools, choice, self.key)
