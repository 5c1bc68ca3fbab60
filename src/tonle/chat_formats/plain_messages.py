"""Calls and their results as plain messages, for templates that know neither.

Does: an assistant's `tool_calls` become text as its format writes them, and `role: tool` messages become messages of the user.
Does not: check messages; what is malformed is left as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec

from tonle.chat_formats.chat_format import ChatFormat

_Message = dict[str, Any]


def plain_tool_messages(messages: Sequence[_Message], chat_format: ChatFormat) -> list[_Message]:
    """Copies without `tool_calls` and without the role `tool`. Results that follow each other are one message, and a message of
    the user right after them is a part of it: many templates want the roles to take turns."""
    names: dict[str, str] = {}  # of the tool, by the id of the call
    plain: list[_Message] = []
    after_result = False
    for message in messages:
        role = message.get("role")
        if role == "assistant" and message.get("tool_calls"):
            names |= _names(message["tool_calls"])
            message = _written(message, chat_format)
        elif role == "tool":
            name = names.get(str(message.get("tool_call_id"))) or message.get("name")
            message = {"role": "user", "content": _result(name, _text(message.get("content")))}
        if after_result and message["role"] == "user":
            plain[-1]["content"] += "\n\n" + _text(message.get("content"))
        else:
            plain.append(message)
        after_result = role == "tool"
    return plain


def _written(message: _Message, chat_format: ChatFormat) -> _Message:
    calls = chat_format.write_calls([_name_and_arguments(call) for call in message["tool_calls"]])
    content = _text(message.get("content"))
    kept = {key: value for key, value in message.items() if key not in ("tool_calls", "content")}
    return {**kept, "content": f"{content}\n{calls}" if content else calls}


def _name_and_arguments(call: _Message) -> tuple[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(msgspec.DecodeError, RecursionError):  # a model's earlier mistake is shown as it was
            arguments = msgspec.json.decode(arguments or "{}")
    return str(function.get("name")), arguments if arguments is not None else {}


def _names(calls: Sequence[_Message]) -> dict[str, str]:
    return {str(call.get("id")): str((call.get("function") or {}).get("name")) for call in calls}


def _result(name: str | None, content: str) -> str:
    return f"Result of {name}:\n{content}" if name else f"Result:\n{content}"


def _text(content: Any) -> str:
    """Of a content, which may be a list of parts."""
    if isinstance(content, list):
        return "\n".join(
            part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)
        )
    return content if isinstance(content, str) else ""
