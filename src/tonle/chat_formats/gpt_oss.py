"""gpt-oss (OpenAI's harmony format): an answer is a row of messages, each with a header that says its channel.

    <|channel|>analysis<|message|>I need the weather.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

`analysis` is thought, `final` and `commentary` are content, and a message to a function is a call. Its models make one call at
a time, so an answer that must call makes one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tonle.chat_formats.base_format import BaseFormat
from tonle.chat_formats.chat_format import MessageParser, ThinkingTags, Tool, ToolChoice
from tonle.chat_formats.grammar_text import ANY_TEXT, arguments, literal, one_of, tag
from tonle.chat_formats.harmony_parser import CHANNEL, CONSTRAIN, ENDS, MESSAGE, START, HarmonyParser

THINKING = ThinkingTags(f"{CHANNEL}analysis{MESSAGE}", ENDS[0], f"{ENDS[0]}{START}assistant")


class GptOss(BaseFormat):
    name = "gpt_oss"
    tags = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
    thinking = THINKING

    def write_calls(self, calls: Sequence[tuple[str, Any]]) -> str:
        between = f"{ENDS[1]}{START}assistant"
        return between.join(_written(*call) for call in calls)

    def parser(self, tools: Sequence[Tool], *, thinking: ThinkingTags | None, is_open: bool = False) -> MessageParser:
        names = {tool.name for tool in tools}
        return HarmonyParser(names, tells_thoughts=thinking is not None, is_open=is_open)

    def _calls_alone(self, tools: Sequence[Tool], choice: ToolChoice) -> str:
        return "\n".join([
            f"start: next? ({self._message('analysis')} {self._tag(ENDS[0])} next)* call",
            *self._rules(),
            one_of("call", [self._call(tool, is_bound=True) for tool in tools]),
        ])  # fmt: skip

    def _calls_in_text(self, tools: Sequence[Tool], choice: ToolChoice) -> str:
        texts = [self._message(channel) for channel in ("analysis", "commentary", "final")]
        return "\n".join([
            f"start: next? message ({self._tag(ENDS[0])} next message)*",
            one_of("message", [*texts, "call"]),
            *self._rules(),
            one_of("call", [self._call(tool, is_bound=tool.strict) for tool in tools]),
        ])  # fmt: skip

    def _rules(self) -> list[str]:
        return [f"next: {self._tag(START)} {literal('assistant')}", ANY_TEXT]

    def _message(self, channel: str) -> str:
        return f"{self._tag(CHANNEL)} {literal(channel)} {self._tag(MESSAGE)} TEXT"

    def _call(self, tool: Tool, *, is_bound: bool) -> str:
        header = literal(f"commentary to=functions.{tool.name} ")
        kind = f"{self._tag(CONSTRAIN)} {literal('json')} {self._tag(MESSAGE)}"
        return f"{self._tag(CHANNEL)} {header} {kind} {arguments(tool, is_bound=is_bound)}"

    def _tag(self, text: str) -> str:
        return tag(text, self._special_tokens)


def _written(name: str, values: Any) -> str:
    arguments = json.dumps(values, ensure_ascii=False)
    return f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}{arguments}"
