"""Calls and results as messages for templates that know neither."""

from __future__ import annotations

from typing import Any

from tonle.chat_formats import find_format, plain_tool_messages


def _call(name: str, arguments: Any, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_loop_of_calls_becomes_text() -> None:
    now = _call("now", {}, "b")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather and time?"},
        {"role": "assistant", "content": "Let me look.", "tool_calls": [_call("get_weather", '{"city": "X"}', "a"), now]},
        {"role": "tool", "tool_call_id": "b", "content": "12:00"},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "hot"}]},
        {"role": "assistant", "content": None, "tool_calls": [_call("now", "", "c")]},
        {"role": "tool", "tool_call_id": "?", "content": "13:00"},
        {"role": "user", "content": "Thanks."},
        {"role": "user", "content": "Bye."},
    ]  # fmt: skip
    before = repr(messages)
    assert plain_tool_messages(messages, find_format(None)) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather and time?"},
        {
            "role": "assistant",
            "content": 'Let me look.\n[{"name": "get_weather", "arguments": {"city": "X"}}, {"name": "now", "arguments": {}}]',
        },
        {"role": "user", "content": "Result of now:\n12:00\n\nResult of get_weather:\nhot"},
        {"role": "assistant", "content": '{"name": "now", "arguments": {}}'},
        {"role": "user", "content": "Result:\n13:00\n\nThanks."},
        {"role": "user", "content": "Bye."},
    ]
    assert repr(messages) == before, "the caller's messages were changed"


def test_a_call_is_written_as_its_format_does() -> None:
    message = {"role": "assistant", "tool_calls": [_call("now", "{}", "a")]}
    (plain,) = plain_tool_messages([message], find_format(None, "hermes"))
    assert plain == {"role": "assistant", "content": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'}


def test_arguments_that_are_no_json_are_shown_as_they_were() -> None:
    message = {"role": "assistant", "tool_calls": [_call("now", "{oops", "a")]}
    (plain,) = plain_tool_messages([message], find_format(None))
    assert plain["content"] == '{"name": "now", "arguments": "{oops"}'
