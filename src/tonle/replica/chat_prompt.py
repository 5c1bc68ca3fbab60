"""The prompt of a chat: messages and tools through the model's template, with what the template cannot say put into messages.

Does: render and tokenize, for chats and for `/tokenize`. Does not: settle anything else of a request (`translate.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tonle.chat_formats.chat_format import Tool
from tonle.chat_formats.plain_messages import plain_tool_messages
from tonle.engine.text import Text
from tonle.errors import InvalidRequest
from tonle.protocol.openai import ChatRequest, Message
from tonle.replica.chat_style import ChatStyle
from tonle.replica.read_tools import template_tool
from tonle.replica.template_messages import template_messages


def chat_prompt(
    request: ChatRequest, messages: list[Message], tools: Sequence[Tool], text: Text,
    style: ChatStyle, variables: Mapping[str, Any] | None,
) -> list[int]:  # fmt: skip
    """Raises `InvalidRequest`."""
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message continues the last message, add_generation_prompt begins another: send one of them",
            param="continue_final_message",
        )
    entries = template_messages(messages)
    given: list[dict[str, Any]] | None = [template_tool(tool) for tool in tools] or None
    if (num_chars := style.format.call_id_chars) is not None:
        _shorten_ids(entries, num_chars)
    if not style.renders_tools:
        entries, given = plain_tool_messages(entries, style.format), None
    if tools and (prompt := style.format.system_prompt(tools)) is not None:
        entries = _with_system(entries, prompt)
    return text.encode_chat(
        entries,
        add_generation_prompt=request.add_generation_prompt is not False and not continues,
        continue_final_message=continues,
        tools=given,
        extra=variables,
    )


def _with_system(entries: list[dict[str, Any]], prompt: str) -> list[dict[str, Any]]:
    """`prompt` in the system message, behind what the caller says there."""
    first = entries[0]
    if first["role"] in ("system", "developer"):
        content = f"{first['content']}\n\n{prompt}" if first["content"] else prompt
        return [{**first, "content": content}, *entries[1:]]
    return [{"role": "system", "content": prompt}, *entries]


def _shorten_ids(entries: list[dict[str, Any]], num_chars: int) -> None:
    """Ids of calls as the template takes them: callers bring those of other servers, too."""

    def short(call_id: str) -> str:
        return re.sub(r"[^a-zA-Z0-9]", "", call_id)[-num_chars:].rjust(num_chars, "0")

    for entry in entries:
        if "tool_call_id" in entry:
            entry["tool_call_id"] = short(entry["tool_call_id"])
        for call in entry.get("tool_calls", ()):
            if "id" in call:
                call["id"] = short(call["id"])
