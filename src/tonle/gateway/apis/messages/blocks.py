"""Content blocks of Anthropic's Messages API as chat messages.

Does: turn text, tool_use, tool_result and thinking blocks into messages, merge turns of one role. Does not: take blocks
that are not text: they are refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from tonle.errors import InvalidRequest
from tonle.gateway.apis.chat_body import function_call
from tonle.protocol.openai import about

_NOT_TEXT = ("image", "document", "container_upload")


class Block(msgspec.Struct, kw_only=True):
    """All the kinds that are read, in one; `type` says which fields count."""

    type: Annotated[str, about("text, tool_use, tool_result, thinking or redacted_thinking.")]
    text: str | None = None
    id: Annotated[str | None, about("Of tool_use.")] = None
    name: Annotated[str | None, about("Of tool_use.")] = None
    input: Annotated[dict[str, Any] | None, about("Of tool_use.")] = None
    tool_use_id: Annotated[str | None, about("Of tool_result: which call it answers.")] = None
    content: Annotated[str | list[Block] | None, about("Of tool_result: text, or text blocks.")] = None
    is_error: Annotated[bool | None, about("Of tool_result: the tool failed.")] = None
    thinking: str | None = None
    # They do not change what the model reads.
    signature: Any = None
    data: Any = None
    cache_control: Any = None
    citations: Any = None
    caller: Any = None


class ConversationMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: Annotated[str | list[Block], about("Text, or content blocks.")]


def chat_messages(system: str | list[Block] | None, messages: list[ConversationMessage]) -> list[dict[str, Any]]:
    """Raises `InvalidRequest`."""
    chat: list[dict[str, Any]] = []
    if system:
        _add(chat, {"role": "system", "content": _text(system, "system")})
    for index, message in enumerate(messages):
        path = f"messages[{index}].content"
        if message.role == "assistant":
            _add(chat, _assistant(message.content, path))
        elif message.role == "system":
            _add(chat, {"role": "system", "content": _text(message.content, path)})
        else:
            for each in _user(message.content, path):
                _add(chat, each)
    return chat


def _add(chat: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Turns of one role in a row are one turn in Anthropic's API; many chat templates take no others."""
    last = chat[-1] if chat else None
    if last is None or last["role"] != message["role"] or message["role"] == "tool":
        chat.append(message)
        return
    last["content"] = "\n".join(text for text in (last["content"], message["content"]) if text)
    for name in ("tool_calls", "reasoning_content"):
        if name in message:
            last[name] = last[name] + message[name] if name in last else message[name]


def _assistant(content: str | list[Block], path: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    if isinstance(content, str):
        return message | {"content": content}
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
    message["content"] = "".join(texts)  # an answer that was told in pieces
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(content: str | list[Block], path: str) -> list[dict[str, Any]]:
    """Results of tools come first: in a chat they follow the message that has the calls."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    for index, block in enumerate(content):
        place = f"{path}[{index}]"
        match block.type:
            case "text":
                texts.append(_needed(block.text, f"{place}.text"))
            case "tool_result":
                text = _text(block.content or "", f"{place}.content")
                results.append({
                    "role": "tool",
                    "tool_call_id": _needed(block.tool_use_id, f"{place}.tool_use_id"),
                    "content": f"Error: {text}" if block.is_error else text,
                })  # fmt: skip
            case _:
                raise _refused(block, place, "a user's message has text and tool_result")
    if texts or not results:
        results.append({"role": "user", "content": "\n".join(texts)})
    return results


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
