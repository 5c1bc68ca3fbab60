"""Which earlier answer a request goes on from: answers give out ids, and later requests repeat them.

An agent's loop is a row of requests: the model calls a tool, and the next request brings the result under the id of that
call. `/v1/responses` names the earlier answer itself.

Does: find the ids in requests and in answers, of /v1/chat/completions, /v1/responses and /v1/messages alike. Does not:
remember who gave out which (`gateway/chains.py`, `audit/index.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from tonle.protocol.answers import Answer

MAX_NAMED = 64  # ids of a request that are looked at, the newest first; the newest is nearly always known
MAX_GIVEN = 1024  # ids of an answer
MAX_ID_CHARS = 256
MIN_ID_CHARS = 9  # shorter ones are numbers such as call_1, which many answers have


def named_ids(body: Mapping[str, Any]) -> list[str]:
    """The ids of earlier answers that a request repeats, the newest first."""
    return list(islice(filter(_is_id, _named(body)), MAX_NAMED))


def _named(body: Mapping[str, Any]) -> Iterator[Any]:
    yield body.get("previous_response_id")
    messages = body.get("messages")
    if messages is None:
        messages = body.get("input")
    for message in reversed(messages) if isinstance(messages, list) else ():
        if isinstance(message, dict):
            yield message.get("tool_call_id")  # a result
            yield message.get("call_id")  # a result, or a call: an item of /v1/responses
            yield from _calls_in(message)


def _calls_in(message: Mapping[str, Any]) -> Iterator[Any]:
    """Of an assistant's message its calls; of a message in blocks its calls and results."""
    calls, blocks = message.get("tool_calls"), message.get("content")
    for call in reversed(calls) if isinstance(calls, list) else ():
        yield call.get("id") if isinstance(call, dict) else None
    for block in reversed(blocks) if isinstance(blocks, list) else ():
        if isinstance(block, dict):
            yield block.get("tool_use_id")
            yield block.get("id") if block.get("type") == "tool_use" else None


def given_ids(answer: Answer) -> list[str]:
    """The ids an answer gives out."""
    calls = (call for choice in answer.choices.values() for call in choice.tool_calls.values())
    return drawn_ids(calls)


def drawn_ids(calls: Any) -> list[str]:
    """Of tool calls. Ids that are made of the tool's name (`functions.weather:0`) are not: any answer may have them."""
    found = []
    for call in islice(calls, MAX_GIVEN):
        call_id, name = call.get("id"), _name(call)
        if _is_id(call_id) and not (name and name in call_id):
            found.append(call_id)
    return found


def _name(call: Mapping[str, Any]) -> str | None:
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else call.get("name")
    if isinstance(name, list):  # the pieces of a stream that has not ended
        name = "".join(name)
    return name if isinstance(name, str) else None


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and MIN_ID_CHARS <= len(value) <= MAX_ID_CHARS
