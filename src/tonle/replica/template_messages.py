"""Chat messages from the wire into what chat templates read.

Does: join text parts, give `developer` the name templates know, unpack tool arguments. Does not: render.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tonle.errors import InvalidRequest
from tonle.protocol.bounded_json import decode_json
from tonle.protocol.openai import Message


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Raises `InvalidRequest`."""
    if not messages:
        raise InvalidRequest("messages is empty; send at least one message", param="messages")
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _template_message(message: Message, path: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"role": message.role, "content": _content(message, path)}
    if message.name is not None:
        entry["name"] = message.name
    if message.tool_call_id is not None:
        entry["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        entry["tool_calls"] = [
            _tool_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
        ]
    return entry


def _content(message: Message, path: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role != "assistant":
            raise InvalidRequest(f"{path}.content is missing", param=f"{path}.content")
        return ""
    texts = []
    for index, part in enumerate(message.content):
        place = f"{path}.content[{index}]"
        if part.type != "text":
            raise InvalidRequest(f"{place} has type {part.type!r}; this server reads text only", param=f"{place}.type")
        if part.text is None:
            raise InvalidRequest(f"{place}.text is missing", param=f"{place}.text")
        texts.append(part.text)
    return "\n".join(texts)


def _tool_call(call: dict[str, Any], path: str) -> dict[str, Any]:
    """On the wire arguments are JSON in a string; templates expect the object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = decode_json(function["arguments"].encode(), f"{path}.function.arguments")
    except msgspec.DecodeError:
        return call  # a model's earlier mistake; the template gets to see it as it was
    return {**call, "function": {**function, "arguments": arguments}}
