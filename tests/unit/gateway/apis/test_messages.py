"""The Messages API without a gateway: bodies in, events out."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gateway.scripted_chat import USAGE, call, pieces
from tonle.errors import InvalidRequest
from tonle.gateway.apis.messages.reply import MessagesReply, whole_message
from tonle.gateway.apis.messages.request import CountTokensRequest, MessagesRequest, chat_body, count_body
from tonle.gateway.refusals import UpstreamFailed
from tonle.protocol.parse import parse

USER: dict[str, Any] = {"role": "user", "content": "hi"}
TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}


def body_of(**fields: Any) -> dict[str, Any]:
    asked = {"model": "m", "max_tokens": 5, "messages": [USER], **fields}
    request, warnings = parse(msgspec.json.encode(asked), MessagesRequest)
    return chat_body(request, warnings)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"top_k": 4, "top_p": 0.5, "temperature": 0.1}, {"top_k": 4, "top_p": 0.5, "temperature": 0.1}),
        ({"speculate": False}, {"speculate": False}),
        ({"metadata": {"user_id": "u"}}, {"user": "u"}),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}),
        ({"tools": [TOOL], "tool_choice": {"type": "auto"}}, {"tool_choice": "auto"}),
        ({"tools": [TOOL], "tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        ({"tool_choice": {"type": "auto"}}, {}),
        ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
        ({"service_tier": "auto", "cache_control": {"type": "ephemeral"}}, {}),
    ],
)  # fmt: skip
def test_fields(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    body = body_of(**fields)
    body.pop("tools", None)
    assert body == {"model": "m", "max_tokens": 5, "messages": [USER], **expected}


@pytest.mark.parametrize("where", ["output_config", "output_format"])
def test_a_schema_for_the_answer(where: str) -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    body = body_of(**{where: wanted if where == "output_format" else {"format": wanted}})
    assert body["response_format"]["json_schema"] == {"name": "answer", "schema": {"type": "object"}, "strict": True}


def test_turns_of_one_role_become_one() -> None:
    blocks = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    thought = {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"},
                                               {"type": "redacted_thinking", "data": "x"},
                                               {"type": "text", "text": "yes"}]}  # fmt: skip
    body = body_of(system="S", messages=[USER, {"role": "user", "content": blocks}, thought, USER])
    assert body["messages"] == [
        {"role": "system", "content": "S"}, {"role": "user", "content": "hi\na\nb"},
        {"role": "assistant", "content": "yes", "reasoning_content": "t"}, USER,
    ]  # fmt: skip


def test_a_last_message_of_the_assistant_is_continued() -> None:
    messages = [USER, {"role": "assistant", "content": "The answer is"}]
    assert body_of(messages=messages)["continue_final_message"] is True
    request, _ = parse(msgspec.json.encode({"messages": messages}), CountTokensRequest)
    assert count_body(request) == {
        "messages": messages, "continue_final_message": True, "add_generation_prompt": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "text only"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"content\[0\].text is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}]}, "tool_use"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}]}, "tool_result"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id is missing"),
        ({"messages": [{"role": "robot", "content": ""}]}, "must be one of"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}]}]}, "text only"),
        ({"system": [{"type": "image"}]}, "text only"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "f"}]}, "input_schema is missing"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "one of f"),
        ({"tool_choice": {"type": "any"}}, "no tools"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "at least 1"),
        ({"max_tokens": "9"}, "max_tokens must be an integer"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        body_of(**fields)


# -- replies


class Written:
    """An exchange that keeps what is written."""

    request_id, path = "r", "/v1/messages"

    def __init__(self) -> None:
        self.written, self.ended = b"", False

    def write(self, piece: bytes) -> None:
        self.written += piece

    def end(self) -> None:
        self.ended = True


MESSAGE = {
    "content": "ភ្នំពេញ", "reasoning_content": "Hm.", "tool_calls": [call("f", '{"a": "ខ"}'), call("g", "{}", call_id="b")],
}  # fmt: skip


def stream_of(message: dict[str, Any], finish: str | None = "tool_calls") -> bytes:
    chunks: list[dict[str, Any]] = [
        {"id": "chatcmpl-1", "model": "m", "choices": [{"delta": delta}]} for delta in pieces(message)
    ]
    chunks += [{"choices": [{"delta": {}, "finish_reason": finish}]}, {"choices": [], "usage": USAGE}]
    return (
        b": queued\n\n"
        + b"".join(b"data: %b\n\n" % msgspec.json.encode(chunk) for chunk in chunks)
        + b"data: [DONE]\n\n"
    )


def events_in(written: bytes) -> list[dict[str, Any]]:
    events = [event for event in written.split(b"\n\n") if event and not event.startswith(b":")]
    return [msgspec.json.decode(event.partition(b"\ndata: ")[2]) for event in events]


def sent(stream: bytes, cuts: list[int]) -> Written:
    exchange = Written()
    outlet = MessagesReply(exchange, "msg_1", "m")  # type: ignore[arg-type]
    places = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    for start, end in itertools.pairwise(places):
        outlet.write(stream[start:end])
    outlet.end()
    return exchange


@given(st.lists(st.integers(0, 10_000), max_size=40))
@settings(max_examples=30, deadline=None)
def test_a_stream_says_what_the_whole_answer_says_however_it_is_cut(cuts: list[int]) -> None:
    exchange = sent(stream_of(MESSAGE), cuts)
    assert exchange.ended
    start, *middle, delta, stop = events_in(exchange.written)
    assert (start["type"], delta["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    blocks: list[dict[str, Any]] = []
    texts: dict[str, str] = {}
    for event in middle:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"])
            case "content_block_delta":
                for name, piece in event["delta"].items():
                    if name != "type":
                        texts[f"{event['index']} {name}"] = texts.get(f"{event['index']} {name}", "") + piece
            case "content_block_stop":
                assert event["index"] == len(blocks) - 1
    choice = {"message": MESSAGE, "finish_reason": "tool_calls"}
    whole = whole_message(msgspec.json.encode({"id": "chatcmpl-1", "choices": [choice], "usage": USAGE}), "msg_1")
    assert [block["type"] for block in blocks] == [block["type"] for block in whole["content"]]
    assert texts["0 thinking"] == "Hm." and texts["0 signature"] == whole["content"][0]["signature"]
    assert texts["1 text"] == "ភ្នំពេញ"
    assert [msgspec.json.decode(texts[f"{index} partial_json"]) for index in (2, 3)] == [{"a": "ខ"}, {}]
    assert delta["usage"] == whole["usage"] and delta["delta"]["stop_reason"] == whole["stop_reason"] == "tool_use"


@given(st.integers(0, 2000))
@settings(max_examples=40, deadline=None)
def test_a_stream_that_ends_anywhere_is_not_taken_for_a_whole_answer(place: int) -> None:
    stream = stream_of(MESSAGE)
    with pytest.raises(UpstreamFailed, match="broke off"):
        sent(stream[: place % stream.index(b'"finish_reason"')], [])


@given(st.lists(st.sampled_from([
    b"data: {}", b'data: {"choices": 5}', b'data: {"choices": [{"delta": 5}]}', b'data: {"choices": [{"delta": {"content": 5}}]}',
    b'data: {"choices": [{"delta": {"tool_calls": [5, {"index": "x", "function": 5}]}}]}', b"data: [", b"event: ping",
    b'data: {"choices": [{"delta": {"tool_calls": [{"index": 1, "id": "a", "function": {"name": "f"}}]}}]}',
    b'data: {"choices": [{"delta": {"tool_calls": [{"index": 2, "id": "b", "function": {"name": "g"}}]}}]}',
    b'data: {"choices": [{"delta": {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]}}]}',
    b'data: {"error": 5}', b'data: {"usage": 5, "id": 5, "model": 5}', b'data: {"choices": [{"finish_reason": "odd"}]}',
]), max_size=8))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_whatever_a_backend_sends_the_events_are_in_order(events: list[bytes]) -> None:
    exchange = Written()
    outlet = MessagesReply(exchange, "msg_1", "m")  # type: ignore[arg-type]
    outlet.write(b"".join(event + b"\n\n" for event in events))
    try:
        outlet.end()
    except UpstreamFailed as error:  # as the pipeline does
        outlet.write(b"data: %b\n\n" % msgspec.json.encode({"error": {"message": error.message}}))
        outlet.end()
    assert exchange.ended
    told = events_in(exchange.written)
    kinds = [event["type"] for event in told if event["type"] != "ping"]
    assert kinds[-1] in ("message_stop", "error") and kinds.count("error") <= 1
    assert "message_start" not in kinds[1:]
    open_block: int | None = None
    for event in told:
        if event["type"] == "content_block_start":
            assert open_block is None
            open_block = event["index"]
        elif event["type"].startswith("content_block"):
            assert event["index"] == open_block
            open_block = None if event["type"] == "content_block_stop" else open_block
    assert open_block is None or kinds[-1] == "error"


@pytest.mark.parametrize(
    ("choice", "reason", "sequence"),
    [
        ({"finish_reason": "stop"}, "end_turn", None),
        ({"finish_reason": "stop", "stop_reason": "END"}, "stop_sequence", "END"),
        ({"finish_reason": "stop", "stop_reason": 7}, "end_turn", None),
        ({"finish_reason": "length"}, "max_tokens", None),
        ({"finish_reason": "content_filter"}, "refusal", None),
        ({"finish_reason": None}, "end_turn", None),
    ],
)
def test_reasons_to_stop(choice: dict[str, Any], reason: str, sequence: str | None) -> None:
    message = whole_message(msgspec.json.encode({"choices": [{"message": {"content": "x"}, **choice}]}), "msg_1")
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


def test_half_of_a_call_is_never_passed_on() -> None:
    message = {"content": "x", "tool_calls": [call("f", "{}"), call("f", '{"path": "/')]}
    cut = whole_message(msgspec.json.encode({"choices": [{"message": message, "finish_reason": "length"}]}), "msg_1")
    assert [block["type"] for block in cut["content"]] == ["text", "tool_use"] and cut["stop_reason"] == "max_tokens"
    with pytest.raises(UpstreamFailed, match="not a JSON object"):
        whole_message(msgspec.json.encode({"choices": [{"message": message, "finish_reason": "tool_calls"}]}), "msg_1")


def test_comments_become_pings_once_the_message_has_begun() -> None:
    stream = stream_of({"content": "hi"}, "stop")
    begun = stream.index(b"\n\n", stream.index(b"data: ")) + 2
    exchange = sent(stream[:begun] + b": waiting\n\n" + stream[begun:], [])
    assert (
        exchange.written.startswith(b": queued\n\n") and b'event: ping\ndata: {"type":"ping"}\n\n' in exchange.written
    )


def test_pieces_of_two_calls_are_not_mixed_into_one() -> None:
    def piece(index: int, **function: str) -> dict[str, Any]:
        return {"tool_calls": [{"index": index, "id": f"c{index}", "function": function}]}

    deltas = [piece(0, name="f", arguments="{"), piece(1, name="g", arguments="{}"), piece(0, arguments="}")]
    chunks = [{"choices": [{"delta": delta}]} for delta in deltas]
    stream = b"".join(b"data: %b\n\n" % msgspec.json.encode(chunk) for chunk in chunks)
    exchange = Written()
    outlet = MessagesReply(exchange, "msg_1", "m")  # type: ignore[arg-type]
    outlet.write(stream)
    with pytest.raises(UpstreamFailed, match="mixed"):  # for the record; the caller has been told
        outlet.end()
    outlet.end()
    assert events_in(exchange.written)[-1]["error"]["message"] == "the backend mixed the pieces of its tool calls"


def test_thoughts_may_be_left_out_of_the_reply() -> None:
    assert body_of(thinking={"type": "adaptive", "display": "omitted"})["include_reasoning"] is False
    assert "include_reasoning" not in body_of(thinking={"type": "adaptive", "display": "summarized"})


def test_what_changes_the_prompt_is_counted() -> None:
    choice = {"type": "none", "disable_parallel_tool_use": True}
    asked = {"messages": [USER], "tools": [TOOL], "tool_choice": choice, "output_config": {"effort": "low"}}
    counted = count_body(parse(msgspec.json.encode(asked), CountTokensRequest)[0])
    assert counted["tool_choice"] == "none" and counted["reasoning_effort"] == "low"
    assert "parallel_tool_calls" not in counted
