"""What chat answers say, for the APIs they are translated into.

Does: find text, thoughts, calls and usage in a message or a delta of whatever server. Does not: decode bytes
(`chat_stream.py`). Nothing here raises, except where it says so.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tonle.gateway.apis.chat_stream import decoded
from tonle.gateway.refusals import UpstreamFailed
from tonle.protocol.replies import content_text


class TokenCounts(NamedTuple):
    prompt: int = 0
    cached: int = 0  # of the prompt
    completion: int = 0


class ToolCall(NamedTuple):
    id: str
    name: str
    arguments: dict[str, Any]


def token_counts(usage: Any) -> TokenCounts:
    if not isinstance(usage, dict):
        return TokenCounts()
    details = usage.get("prompt_tokens_details")
    cached = _count(details, "cached_tokens")
    return TokenCounts(_count(usage, "prompt_tokens"), cached, _count(usage, "completion_tokens"))


def _count(facts: Any, name: str) -> int:
    value = facts.get(name) if isinstance(facts, dict) else None
    return value if isinstance(value, int) and value >= 0 else 0


def text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    return content_text(content) if isinstance(content, str | list) else ""


def thoughts_of(message: dict[str, Any]) -> str:
    """Servers have two names for them."""
    found = message.get("reasoning_content") or message.get("reasoning")
    return found if isinstance(found, str) else ""


def calls_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a message or a delta, as they are."""
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def string_in(facts: Any, name: str) -> str:
    """Empty if it is not there or something else."""
    value = facts.get(name) if isinstance(facts, dict) else None
    return value if isinstance(value, str) else ""


def whole_calls(calls: list[dict[str, Any]], *, cut_off: bool) -> list[ToolCall]:
    """Calls with their arguments as objects. `cut_off`: the answer ended at its longest, perhaps inside of a call, which
    is then left out: nothing may act on half of it. Raises `UpstreamFailed` if arguments are not an object otherwise."""
    found = []
    for index, call in enumerate(calls):
        function = call.get("function")
        name, text = string_in(function, "name"), string_in(function, "arguments")
        arguments = decoded(text.encode("utf-8", "surrogatepass")) if text.strip() else {}
        if isinstance(arguments, dict) and name:
            found.append(ToolCall(string_in(call, "id") or f"call_{index}", name, arguments))
        elif not cut_off:
            raise UpstreamFailed("the backend made a tool call whose arguments are not a JSON object")
    return found


class GrowingCalls:
    """Puts calls together that a stream tells in pieces."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[dict[str, str], list[str]]] = {}  # by index: id and name; pieces of the arguments

    def add(self, delta: dict[str, Any]) -> None:
        for position, call in enumerate(calls_of(delta)):
            facts, pieces = self._calls.setdefault(place_of(call, position), ({}, []))
            function = call.get("function")
            if call_id := string_in(call, "id"):
                facts["id"] = call_id
            if name := string_in(function, "name"):
                facts["name"] = name
            pieces.append(string_in(function, "arguments"))

    def whole(self, *, cut_off: bool) -> list[ToolCall]:
        """Raises `UpstreamFailed`, as `whole_calls`."""
        calls = [
            {"id": facts.get("id"), "function": {"name": facts.get("name"), "arguments": "".join(pieces)}}
            for _, (facts, pieces) in sorted(self._calls.items())
        ]
        return whole_calls(calls, cut_off=cut_off)


def place_of(call: dict[str, Any], position: int) -> int:
    """Which call of the answer a piece belongs to."""
    index = call.get("index")
    return index if isinstance(index, int) else position
