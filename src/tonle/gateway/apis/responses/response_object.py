"""The response object: what a request asked for, and what became of it.

Does: give it every field that OpenAI's clients read; turn chat's usage, finish reasons and names of fields into this API's.
Does not: put the output together (`output.py`).
"""

from __future__ import annotations

import re
import time
from typing import Any

import msgspec

from tonle.gateway.apis.chat_stream import decoded
from tonle.gateway.apis.responses.request import ReadRequest
from tonle.protocol.replies import error_text

# Fields of the chat body that was made, and what the caller calls them.
_NAMES = {
    "messages": "input", "max_completion_tokens": "max_output_tokens", "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format", "response_format": "text.format", "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
}  # fmt: skip
_RENAMED = re.compile(rf"(?:{'|'.join(re.escape(name) for name in _NAMES)})(?![a-z_])")
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}  # why, by chat's finish reason


def new_response(request: ReadRequest, response_id: str, *, stores: bool) -> dict[str, Any]:
    """As it is when work begins."""
    fields = request.fields
    text, reasoning = fields.text, fields.reasoning
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": fields.metadata or {},
        "model": fields.model or "",
        "output": [],
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "store": stores,
        "temperature": fields.temperature,
        "text": {
            "format": {"type": "text"} if text is None or text.format is None else _given(text.format),
            "verbosity": "medium" if text is None or text.verbosity is None else text.verbosity,
        },
        "tool_choice": "auto" if fields.tool_choice is None else fields.tool_choice,
        "tools": [{"description": None, "parameters": None, "strict": None, **tool} for tool in fields.tools or ()],
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": fields.top_p,
        "truncation": fields.truncation or "disabled",
        "usage": None,
        "user": fields.user,
    }


def _given(part: msgspec.Struct) -> dict[str, Any]:
    return {name: value for name in part.__struct_fields__ if (value := getattr(part, name)) is not None}


def conclude(response: dict[str, Any], finish_reason: str | None) -> None:
    """Its status, by the reason for which the chat ended."""
    reason = _INCOMPLETE.get(finish_reason or "")
    response["status"] = "completed" if reason is None else "incomplete"
    response["incomplete_details"] = None if reason is None else {"reason": reason}
    response["completed_at"] = int(time.time())


def is_cut(finish_reason: str | None) -> bool:
    """The answer is not complete."""
    return finish_reason in _INCOMPLETE


def usage_of(usage: Any) -> dict[str, Any] | None:
    """From chat's. None if the backend did not count, or what it said are no numbers."""
    if not isinstance(usage, dict):
        return None
    asked, written = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    return {
        "input_tokens": asked,
        "input_tokens_details": {
            "cached_tokens": _count(_inside(usage, "prompt_tokens_details", "cached_tokens")),
            "cache_write_tokens": 0,
        },
        "output_tokens": written,
        "output_tokens_details": {
            "reasoning_tokens": _count(_inside(usage, "completion_tokens_details", "reasoning_tokens"))
        },
        "total_tokens": asked + written,
    }


def _inside(usage: dict[str, Any], group: str, name: str) -> Any:
    details = usage.get(group)
    return details.get(name) if isinstance(details, dict) else None


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def error_of(error: Any) -> dict[str, Any]:
    """The error in an error body of ours or a backend's, as the four fields of OpenAI's."""
    found = error if isinstance(error, dict) else {}
    kind, code, param = found.get("type"), found.get("code"), found.get("param")
    return {
        "type": kind if isinstance(kind, str) else "server_error",
        "code": code if isinstance(code, str) else "server_error",
        "message": _in_callers_words(error_text(error) or "the backend failed and gave no reason"),
        "param": _in_callers_words(param) if isinstance(param, str) else None,
    }


def renamed_error(body: bytes) -> bytes:
    """An error body that may speak of the chat body which the caller never saw."""
    if _RENAMED.search(body.decode(errors="replace")) is None:
        return body
    found = decoded(body)
    error = found.get("error") if isinstance(found, dict) else None
    if not isinstance(error, dict):
        return body
    for name in ("message", "param"):
        if isinstance(text := error.get(name), str):
            error[name] = _in_callers_words(text)
    return msgspec.json.encode(found)


def _in_callers_words(text: str) -> str:
    """Only where it begins: what follows may quote the caller."""
    match = _RENAMED.match(text)
    return text if match is None else _NAMES[match[0]] + text[match.end() :]
