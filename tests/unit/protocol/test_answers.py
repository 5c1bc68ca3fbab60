"""Reasoning and tool calls in an `Answer`: the same whether it is read from chunks, from a whole reply, or filled by a sender."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tonle.protocol.answers import Answer, Collector

CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"ភ្នំពេញ"}'}},
    {"id": "call_2", "type": "function", "function": {"name": "time", "arguments": "{}"}},
]
MESSAGE = {"role": "assistant", "content": "Let me see.", "reasoning_content": "Which city?", "tool_calls": CALLS}


def chunks(index: int = 0) -> list[dict[str, Any]]:
    """`MESSAGE` as a server streams it."""
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Which "},
        {"reasoning_content": "city?"},
        {"content": "Let me "},
        {"content": "see."},
    ]
    for position, call in enumerate(CALLS):
        function: dict[str, Any] = call["function"]  # type: ignore[assignment]
        opening = {"index": position, "id": call["id"], "type": "function"}
        deltas.append({"tool_calls": [{**opening, "function": {"name": function["name"], "arguments": ""}}]})
        arguments = function["arguments"]
        deltas += [
            {"tool_calls": [{"index": position, "function": {"arguments": piece}}]}
            for piece in (arguments[:3], arguments[3:])
        ]
    return [{"id": "c", "choices": [{"index": index, "delta": delta}]} for delta in deltas]


def streamed(events: list[dict[str, Any]], size: int) -> Answer:
    body = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"
    collector = Collector("text/event-stream")
    for start in range(0, len(body), size):
        collector.feed(body[start : start + size])
    return collector.finish()


def whole(message: dict[str, Any]) -> Answer:
    collector = Collector("application/json")
    body = {"id": "c", "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    collector.feed(json.dumps(body).encode())
    return collector.finish()


def filled() -> Answer:
    answer = Answer()
    answer.add_reasoning(0, "Which ", 10.0)
    answer.add_reasoning(0, "city?", 11.0)
    answer.add_text(0, "Let me ", 12.0)
    answer.add_text(0, "see.", 13.0)
    for position, call in enumerate(CALLS):
        function: dict[str, Any] = call["function"]  # type: ignore[assignment]
        answer.add_call(0, position, str(call["id"]), function["name"], 14.0)
        answer.add_arguments(0, position, function["arguments"][:3], 15.0)
        answer.add_arguments(0, position, function["arguments"][3:], 16.0)
    answer.finish()
    return answer


def parts(answer: Answer, index: int = 0) -> tuple[str, str, list[dict[str, Any]]]:
    choice = answer.choices[index]
    return choice.text, "".join(choice.reasoning), list(choice.tool_calls.values())


@pytest.mark.parametrize("size", [1, 17, 100_000])
def test_an_answer_is_the_same_however_it_came(size: int) -> None:
    expected = ("Let me see.", "Which city?", CALLS)
    assert parts(streamed(chunks(), size)) == expected
    assert parts(whole(MESSAGE)) == expected
    assert parts(filled()) == expected


def test_finishing_twice_changes_nothing_and_times_are_those_of_the_first_and_last_piece() -> None:
    answer = filled()
    answer.finish()
    assert parts(answer) == ("Let me see.", "Which city?", CALLS)
    assert (answer.first_s, answer.last_s) == (10.0, 16.0)


def test_calls_of_several_choices_stay_apart() -> None:
    answer = Answer()
    for index in (1, 0):
        answer.add_call(index, 0, f"call_{index}", "f", 1.0)
        answer.add_arguments(index, 0, f'{{"n":{index}}}', 2.0)
    answer.finish()
    assert [parts(answer, index)[2][0]["function"]["arguments"] for index in (0, 1)] == ['{"n":0}', '{"n":1}']
    assert answer.text == ""


def test_the_older_form_of_a_call_is_kept_too() -> None:
    call = {"name": "weather", "arguments": '{"city":"Takeo"}'}
    assert parts(whole({"content": None, "function_call": call}))[2] == [{"function": call}]
    pieces = [
        {"function_call": {"name": "weather", "arguments": ""}},
        {"function_call": {"arguments": call["arguments"]}},
    ]
    events = [{"choices": [{"index": 0, "delta": delta}]} for delta in pieces]
    assert parts(streamed(events, 50))[2] == [{"function": call}]


def test_calls_and_reasoning_of_streamed_responses() -> None:
    events = [
        {"type": "response.created", "response": {"id": "resp_1", "model": "m"}},
        {"type": "response.output_item.added", "output_index": 0, "item": {"type": "reasoning", "id": "rs_1"}},
        {"type": "response.reasoning_text.delta", "output_index": 0, "delta": "Which "},
        {"type": "response.reasoning_text.delta", "output_index": 0, "delta": "city?"},
        {"type": "response.output_text.delta", "output_index": 1, "delta": "Let me see."},
    ]
    for place, call in enumerate(CALLS, 2):
        function: dict[str, Any] = call["function"]  # type: ignore[assignment]
        item = {"type": "function_call", "id": f"fc_{place}", "call_id": call["id"], "name": function["name"]}
        done = {**item, "arguments": function["arguments"]}
        events += [
            {"type": "response.output_item.added", "output_index": place, "item": {**item, "arguments": ""}},
            {"type": "response.function_call_arguments.delta", "output_index": place, "delta": function["arguments"]},
            {"type": "response.output_item.done", "output_index": place, "item": done},
        ]
    answer = streamed([*events, {"type": "response.completed", "response": {"id": "resp_1", "usage": {}}}], 40)
    assert parts(answer) == ("Let me see.", "Which city?", CALLS)
    assert (answer.response_id, answer.complete) == ("resp_1", True)


def test_calls_and_reasoning_of_streamed_messages() -> None:
    blocks: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"type": "thinking", "thinking": ""}, {"type": "thinking_delta", "thinking": "Which city?"}),
        ({"type": "text", "text": ""}, {"type": "text_delta", "text": "Let me see."}),
    ]
    for call in CALLS:
        function: dict[str, Any] = call["function"]  # type: ignore[assignment]
        begun = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
        blocks.append((begun, {"type": "input_json_delta", "partial_json": function["arguments"]}))
    events: list[dict[str, Any]] = [{"type": "message_start", "message": {"id": "msg_1", "model": "m"}}]
    for place, (block, delta) in enumerate(blocks):
        events.append({"type": "content_block_start", "index": place, "content_block": block})
        events.append({"type": "content_block_delta", "index": place, "delta": delta})
        events.append({"type": "content_block_stop", "index": place})
    answer = streamed(
        [*events, {"type": "message_delta", "delta": {"stop_reason": "tool_use"}}, {"type": "message_stop"}], 40
    )
    assert parts(answer) == ("Let me see.", "Which city?", CALLS)
    assert (answer.response_id, answer.complete) == ("msg_1", True)


@pytest.mark.parametrize("odd", [1, [], "x", {"type": "tool_use"}, {"type": "function_call", "name": 7, "id": []}])
def test_odd_events_are_borne(odd: Any) -> None:
    events = [
        {"type": "content_block_start", "index": odd, "content_block": odd},
        {"type": "response.output_item.added", "output_index": odd, "item": odd},
        {"type": "response.function_call_arguments.delta", "delta": odd},
        {"type": "content_block_delta", "delta": {"partial_json": odd, "thinking": odd, "text": odd}},
    ]
    answer = streamed([*events, {"choices": [{"index": 0, "delta": {"content": "on"}}]}], 30)
    assert answer.text.endswith("on")
