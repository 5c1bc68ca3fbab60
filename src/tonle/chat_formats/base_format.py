"""`BaseFormat`: what the formats have in common.

Does: parsers from a format's `CallReader`, the rules about which grammar a choice needs, a system prompt for templates that
know no tools. Does not: know how calls are written.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from tonle.chat_formats.answer_parser import AnswerParser, CallReader
from tonle.chat_formats.chat_format import MessageParser, ThinkingTags, Tool, ToolChoice
from tonle.chat_formats.grammar_text import called_tools


class BaseFormat(ABC):
    """A `ChatFormat`, but for its calls."""

    name: str
    thinking: ThinkingTags | None = None
    tags: tuple[str, ...] = ()
    call_id_chars: int | None = None

    def __init__(self, template: str = "", *, has_tools: bool = False, special_tokens: Mapping[str, int] | None = None):
        """`has_tools`: the template tells the model about tools. `special_tokens`: their ids, by their texts."""
        self._template = template
        self._has_tools = has_tools
        self._special_tokens = {tag: token for tag, token in (special_tokens or {}).items() if tag in self.tags}
        self.reads_special_tokens = bool(self._special_tokens)

    @abstractmethod
    def parser(
        self, tools: Sequence[Tool], *, thinking: ThinkingTags | None, is_open: bool = False
    ) -> MessageParser: ...

    def grammar(self, tools: Sequence[Tool], choice: ToolChoice) -> str | None:
        """Raises `InvalidRequest` if the tool that is chosen is not among the tools."""
        called = called_tools(tools, choice)
        if choice.must_call or choice.name is not None:
            return self._calls_alone(called, choice) if called else None
        if any(tool.strict for tool in tools):
            return self._calls_in_text(tools, choice)
        return None

    def system_prompt(self, tools: Sequence[Tool]) -> str | None:
        if self._has_tools or not tools:
            return None
        described = "\n".join(json.dumps(_description(tool), ensure_ascii=False) for tool in tools)
        example = (tools[0].name, _example(tools[0].parameters))  # words like NAME would be copied by a small model
        return (
            f"You can call these functions:\n{described}\n\n"
            f"To call a function, answer only like this:\n{self.write_calls([example])}\n"
            f"To call more than one, answer only like this:\n{self.write_calls([example, example])}\n"
            "If no function helps, answer in words."
        )

    @abstractmethod
    def write_calls(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Calls as this format's models write them: names and arguments."""

    @abstractmethod
    def _calls_alone(self, tools: Sequence[Tool], choice: ToolChoice) -> str:
        """The grammar of an answer that consists of calls of these tools."""

    @abstractmethod
    def _calls_in_text(self, tools: Sequence[Tool], choice: ToolChoice) -> str:
        """The grammar of any text in which calls of strict tools are what their schemas say."""


class CallReaderFormat(BaseFormat):
    """Calls stand in the text, between thoughts and words, and a `CallReader` finds them."""

    def parser(self, tools: Sequence[Tool], *, thinking: ThinkingTags | None, is_open: bool = False) -> MessageParser:
        return AnswerParser(self._call_reader(tools) if tools else None, thinking, is_open=is_open)

    @abstractmethod
    def _call_reader(self, tools: Sequence[Tool]) -> CallReader: ...


def _example(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as the schema wants them, without saying anything."""
    properties, required = parameters.get("properties"), parameters.get("required")
    if not isinstance(properties, dict):
        return {}
    names = [name for name in properties if name in required] if isinstance(required, list) else list(properties)[:2]
    return {name: _value(properties[name]) for name in names}


def _value(schema: Any) -> Any:
    schema = schema if isinstance(schema, dict) else {}
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return schema["enum"][0]
    values = {"integer": 1, "number": 1, "boolean": True, "array": [], "object": {}, "null": None}
    return values.get(str(schema.get("type")), "...")


def _description(tool: Tool) -> dict[str, Any]:
    described: dict[str, Any] = {"name": tool.name}
    if tool.description:
        described["description"] = tool.description
    if tool.parameters:
        described["parameters"] = tool.parameters
    return described
