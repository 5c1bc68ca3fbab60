"""Content blocks of Anthropic's Messages API as chat messages.

Does: turn text, tool_use, tool_result and thinking blocks into messages, merge turns of one role. Does not: take blocks
that are not text: they are refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from tonle.errors import InvalidRequest
from tonle.gateway.apis.chat_body import function_call
from tonle.protocol.fields import OtherFields
from tonle.protocol.openai import about

_NOT_TEXT = ("image", "document", "container_upload")


class Block(msgspec.Struct, kw_only=True):
    """All the kinds that are read, in one; `type` says which fields count."""

    other_fields: ClassVar = OtherFields(
        silent=dict.fromkeys(
            ("cache_control", "caller", "citations", "data", "signature", "toolset_name"),
            "not part of what the model reads",
        )
    )
    type: Annotated[str, about("text, tool_use, tool_result, thinking or redacted_thinking.")]
    text: str | None = None
    id: Annotated[str | None, about("Of tool_use.")] = None
    name: Annotated[str | None, about("Of tool_use.")] = None
    input: Annotated[dict[str, Any] | None, about("Of tool_use.")] = None
    tool_use_id: Annotated[str | None, about("Of tool_result: which call it answers.")] = None
    content: Annotated[str | list[Block] | None, about("Of tool_result: text, or text blocks.")] = None
    is_error: Annotated[bool | None, about("Of tool_result: the tool failed.")] = None
    thinking: str | None = None


class ConversationMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: Annotated[str | list[Block], about("Text, or content blocks.")]


class Turn:
    """A chat message while it grows: turns of one role in a row are one turn in Anthropic's API, and many chat templates
    take no others."""

    __slots__ = ("_calls", "_texts", "_thoughts", "call_id", "role")

    def __init__(self, role: str, call_id: str | None = None) -> None:
        self.role = role
        self.call_id = call_id  # of a tool message, which never grows
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def add(self, text: str, thoughts: list[str] | None = None, calls: list[dict[str, Any]] | None = None) -> None:
        if text:
            self._texts.append(text)
        self._thoughts += thoughts or ()
        self._calls += calls or ()

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self.role, "content": "\n".join(self._texts)}
        if self.call_id is not None:
            message["tool_call_id"] = self.call_id
        if self._thoughts:
            message["reasoning_content"] = "\n".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = self._calls
        return message


def chat_messages(system: str | list[Block] | None, messages: list[ConversationMessage]) -> list[dict[str, Any]]:
    """Raises `InvalidRequest`."""
    turns: list[Turn] = []
    if system:
        _turn(turns, "system").add(_text(system, "system"))
    for index, message in enumerate(messages):
        path = f"messages[{index}].content"
        if message.role == "system":
            _turn(turns, "system").add(_text(message.content, path))
        elif isinstance(message.content, str):
            _turn(turns, message.role).add(message.content)
        elif message.role == "assistant":
            _add_assistant(turns, message.content, path)
        else:
            _add_user(turns, message.content, path)
    return [turn.message() for turn in turns]


def _turn(turns: list[Turn], role: str) -> Turn:
    """The last one, if it is of that role."""
    if not turns or turns[-1].role != role:
        turns.append(Turn(role))
    return turns[-1]


def _add_assistant(turns: list[Turn], content: list[Block], path: str) -> None:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        place = f"{path}[{index}]"
        match block.type:
            case "text":
                texts.append(_needed(block.text, f"{place}.text"))
            case "thinking":
                thoughts.append(_needed(block.thinking, f"{place}.thinking"))
            case "redacted_thinking":
                pass  # encrypted for Anthropic's own servers
            case "tool_use":
                name, call_id = _needed(block.name, f"{place}.name"), _needed(block.id, f"{place}.id")
                calls.append(function_call(call_id, name, block.input or {}))
            case _:
                raise _refused(block, place, "an assistant's message has text, thinking and tool_use")
    _turn(turns, "assistant").add("".join(texts), thoughts, calls)  # one answer, told in pieces


def _add_user(turns: list[Turn], content: list[Block], path: str) -> None:
    """Results of tools come first: in a chat they follow the message that has the calls."""
    texts: list[str] = []
    num_results = 0
    for index, block in enumerate(content):
        place = f"{path}[{index}]"
        match block.type:
            case "text":
                texts.append(_needed(block.text, f"{place}.text"))
            case "tool_result":
                num_results += 1
                text = _text(block.content or "", f"{place}.content")
                turns.append(Turn("tool", _needed(block.tool_use_id, f"{place}.tool_use_id")))
                turns[-1].add(f"Error: {text}" if block.is_error else text)
            case _:
                raise _refused(block, place, "a user's message has text and tool_result")
    if texts or not num_results:
        _turn(turns, "user").add("\n".join(texts))


def _text(content: str | list[Block], path: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, block in enumerate(content):
        if block.type != "text":
            raise _refused(block, f"{path}[{index}]", "only text can stand here")
        texts.append(_needed(block.text, f"{path}[{index}].text"))
    return "\n".join(texts)


def _needed(value: str | None, path: str) -> str:
    if value is None:
        raise InvalidRequest(f"{path} is missing", param=path)
    return value


def _refused(block: Block, path: str, instead: str) -> InvalidRequest:
    why = "this server reads text only" if block.type in _NOT_TEXT else instead
    return InvalidRequest(f"{path} has type {block.type!r}: {why}", param=f"{path}.type")
