"""Chat messages from the wire into what chat templates read.

Does: join text parts, give `developer` the name templates know, unpack tool arguments. Does not: render.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec

from tonle.errors import InvalidRequest
from tonle.protocol.bounded_json import decode_json
from tonle.protocol.openai import Message
from tonle.protocol.tool_fields import SentFunction


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Raises `InvalidRequest`."""
    if not messages:
        raise InvalidRequest("messages is empty; send at least one message", param="messages")
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _template_message(message: Message, path: str) -> dict[str, Any]:
    role = "tool" if message.role == "function" else message.role  # the older name
    entry: dict[str, Any] = {"role": role, "content": _content(message, path)}
    if message.name is not None:
        entry["name"] = message.name
    if message.tool_call_id is not None:
        entry["tool_call_id"] = message.tool_call_id
    if (thought := message.reasoning_content or message.reasoning) is not None:
        entry["reasoning_content"] = thought
        if not (message.content and message.tool_calls):  # which gpt-oss's template refuses beside each other
            entry["thinking"] = thought  # the name that it knows
    if message.tool_calls or message.function_call is not None:
        if message.role != "assistant":
            name = "tool_calls" if message.tool_calls else "function_call"
            raise InvalidRequest(f"{path}.{name}: only an assistant calls tools", param=f"{path}.{name}")
        entry["tool_calls"] = _calls(message, path)
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


def _calls(message: Message, path: str) -> list[dict[str, Any]]:
    if not message.tool_calls:
        assert message.function_call is not None
        return [{"type": "function", "function": _function(message.function_call, f"{path}.function_call")}]
    calls: list[dict[str, Any]] = []
    for index, call in enumerate(message.tool_calls):
        place = f"{path}.tool_calls[{index}]"
        if call.type not in (None, "function"):
            raise InvalidRequest(f"{place}.type must be function, not {call.type[:100]!r}", param=f"{place}.type")
        entry: dict[str, Any] = {} if call.id is None else {"id": call.id}
        calls.append(entry | {"type": "function", "function": _function(call.function, f"{place}.function")})
    return calls


def _function(function: SentFunction, path: str) -> dict[str, Any]:
    """On the wire arguments are JSON in a string; templates expect the object."""
    arguments: Any = {} if function.arguments is None else function.arguments
    if isinstance(arguments, str):
        with suppress(msgspec.DecodeError):  # a model's earlier mistake; the template gets to see it as it was
            arguments = decode_json(arguments.encode(), f"{path}.arguments") if arguments else {}
    return {"name": function.name, "arguments": arguments}
