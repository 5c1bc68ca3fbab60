"""The ids that requests repeat and answers give out, in the shapes of three APIs."""

from __future__ import annotations

from typing import Any

import pytest

from tonle.protocol.answers import Answer
from tonle.protocol.call_ids import MAX_NAMED, drawn_ids, given_ids, named_ids


def test_chat_names_calls_and_results_the_newest_first() -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [{"id": "call_first"}, {"id": "call_second"}]},
        {"role": "tool", "tool_call_id": "call_first", "content": "x"},
        {"role": "tool", "tool_call_id": "call_second", "content": "y"},
        {"role": "assistant", "tool_calls": [{"id": "call_third"}]},
        {"role": "user", "content": "never mind"},
    ]
    expected = ["call_third", "call_second", "call_first", "call_second", "call_first"]
    assert named_ids({"messages": messages}) == expected


def test_messages_name_them_in_blocks() -> None:
    messages = [
        {"role": "assistant", "content": [{"type": "text", "text": "…"}, {"type": "tool_use", "id": "toolu_aaaa"}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_bbbb", "content": "x"}]},
    ]
    assert named_ids({"messages": messages}) == ["toolu_bbbb", "toolu_aaaa"]


def test_responses_name_them_in_items_or_name_the_answer() -> None:
    items = [
        {"type": "function_call", "call_id": "call_aaaa", "id": "fc_1"},
        {"type": "function_call_output", "call_id": "call_bbbb", "output": "x"},
    ]
    assert named_ids({"input": items, "previous_response_id": "resp_0123"}) == ["resp_0123", "call_bbbb", "call_aaaa"]


def test_no_more_than_the_newest_are_looked_at() -> None:
    messages = [{"role": "tool", "tool_call_id": f"call_{number:05}"} for number in range(10_000)]
    found = named_ids({"messages": messages})
    assert (len(found), found[0]) == (MAX_NAMED, "call_09999")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": 7},
        {"messages": [7, None, [], "x", {"tool_call_id": 7, "tool_calls": 8, "content": 9}]},
        {"messages": [{"tool_calls": [None, {"id": None}], "content": [None, {"type": "tool_use", "id": []}]}]},
        {"messages": [{"tool_call_id": "x" * 300}, {"tool_call_id": "call_1"}]},
        {"messages": None, "input": {"call_id": "call_aaaa"}, "previous_response_id": []},
    ],
)
def test_what_names_nothing(body: Any) -> None:
    assert named_ids(body) == []


def test_an_answer_gives_out_the_ids_of_its_calls() -> None:
    answer = Answer()
    answer.add_call(0, 0, "call_aaaa", "f", 1.0)
    answer.add_call(0, 1, "functions.f:1", "f", 1.0)  # any answer that calls f has this
    answer.add_call(1, 0, "call_1", "f", 1.0)
    answer.add_call(1, 1, "call_bbbb", "f", 1.0)
    answer.finish()
    assert given_ids(answer) == ["call_aaaa", "call_bbbb"]
    assert drawn_ids([{"id": 7}, {"id": "call_cccc", "function": 8}, {"id": "call_dddd", "name": "call_d"}]) == [
        "call_cccc"
    ]
