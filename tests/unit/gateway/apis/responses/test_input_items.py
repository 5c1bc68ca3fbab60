"""Items of a conversation, and the messages of a chat they become."""

from __future__ import annotations

from typing import Any

import pytest

from tonle.gateway.apis.responses.input_items import chat_messages, read_items

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def messages(*items: Any) -> list[dict[str, Any]]:
    return chat_messages(read_items(list(items), "msg_0_in"))


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def test_every_form_of_a_message() -> None:
    assert chat_messages(read_items("Hi", "x")) == [{"role": "user", "content": "Hi"}]
    forms: list[Any] = [
        {"role": "user", "content": "Hi"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {
            "type": "message",
            "role": "user",
            "status": "completed",
            "id": "msg_7",
            "content": [{"type": "text", "text": "Hi"}],
        },
    ]
    assert messages(*forms) == [{"role": "user", "content": "Hi"}] * 3
    assert messages({"role": "assistant", "content": [{"type": "output_text", "text": "Yes", "annotations": []}]}) == [
        {"role": "assistant", "content": "Yes"}
    ]
    assert messages({"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]})[0]["content"] == "No"
    assert [
        each["role"] for each in messages(*({"role": role, "content": "x"} for role in ("system", "developer")))
    ] == [
        "system",
        "developer",
    ]


def test_parts_stay_apart_and_images_are_passed_on() -> None:
    parts = [
        {"type": "input_text", "text": "a"},
        {"type": "input_image", "image_url": "data:x"},
        {"type": "input_text", "text": "b"},
    ]
    assert messages({"role": "user", "content": parts})[0]["content"] == [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "data:x", "detail": "auto"}},
        {"type": "text", "text": "b"},
    ]
    assert messages({"role": "user", "content": []}) == [{"role": "user", "content": ""}]


def test_one_turn_of_an_assistant_is_one_message() -> None:
    found = messages(
        {"role": "user", "content": "q"},
        thought("t"),
        {"role": "assistant", "content": "Let me see."},
        CALL,
        {**CALL, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
    )
    assert found == [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "t",
            "tool_calls": [CHAT_CALL, {**CHAT_CALL, "id": "c2"}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
    ]


def test_thoughts_between_calls_do_not_part_calls_from_their_outputs() -> None:
    found = messages(thought("a"), CALL, thought("b"), {**CALL, "call_id": "c2"})
    assert found == [
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "a\nb",
            "tool_calls": [CHAT_CALL, {**CHAT_CALL, "id": "c2"}],
        }
    ]


def test_two_answers_are_two_messages_and_old_thoughts_are_left_out() -> None:
    said = {"role": "assistant", "content": "x"}
    found = messages(
        thought("old"),
        said,
        thought("older"),
        said,
        {"role": "user", "content": "q"},
        thought("new"),
        said,
        thought("end"),
    )
    assert [each.get("reasoning_content") for each in found] == [None, None, None, "new"]
    assert [each["role"] for each in found] == ["assistant", "assistant", "user", "assistant"]


def test_a_summary_stands_in_for_thoughts() -> None:
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "xyz"}
    assert messages(item, CALL)[0]["reasoning_content"] == "s"
    assert (
        "reasoning_content" not in messages({"type": "reasoning", "summary": [], "encrypted_content": "xyz"}, CALL)[0]
    )


def test_items_have_ids_and_their_full_form() -> None:
    items = read_items(
        [{"role": "user", "content": "a"}, {**CALL, "id": "fc_1"}, {"id": "x", "role": "assistant", "content": "b"}],
        "msg_0_in",
    )
    assert [item["id"] for item in items] == ["msg_0_in0", "fc_1", "x"]
    assert (
        items[0]["content"] == [{"type": "input_text", "text": "a"}] and items[2]["content"][0]["type"] == "output_text"
    )
    assert read_items([{"id": "msg_1"}], "y") == [{"type": "item_reference", "id": "msg_1"}]


@pytest.mark.parametrize("odd", ["", "x" * 200, 5, None, []])
def test_an_id_that_cannot_be_one_is_replaced(odd: Any) -> None:
    (item,) = read_items([{"role": "user", "content": "a", "id": odd}], "msg_0_in")
    assert item["id"] == "msg_0_in0"
