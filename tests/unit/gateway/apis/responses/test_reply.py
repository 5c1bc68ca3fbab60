"""A chat's answer into a response and its events: cut anywhere, and from backends that send anything."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import msgspec
import pytest

from tests.gateway.responses.chat_backend import USAGE, call, chat_chunks
from tonle.edge.client import UpstreamError
from tonle.gateway.apis.responses import output
from tonle.gateway.apis.responses.reply import ResponseReply
from tonle.gateway.apis.responses.request import read_request
from tonle.gateway.apis.responses.response_object import error_of, new_response, renamed_error, usage_of
from tonle.gateway.refusals import UpstreamFailed

MESSAGE = {
    "reasoning_content": "Think\nfirst.",
    "content": "ភ្នំពេញ ok",
    "tool_calls": [call("f", '{"a": 1}', "c1"), call("g", '{"b": "é"}', "c2")],
}


class Caller:
    """What an exchange was told."""

    def __init__(self) -> None:
        self.status, self.body, self.ended = 0, b"", False

    def reply(self, body: bytes, *, status: int = 200, content_type: str = "", headers: Any = ()) -> None:
        self.status, self.body, self.ended = status, body, True

    def start(self, *, status: int = 200, content_type: str, headers: Any = ()) -> None:
        assert content_type.startswith("text/event-stream")
        self.status = status

    def write(self, piece: bytes) -> None:
        self.body += piece

    def end(self) -> None:
        self.ended = True

    @property
    def events(self) -> list[dict[str, Any]]:
        found = []
        for event in self.body.decode().split("\n\n"):
            if event and not event.startswith(":"):
                name, data = event.split("\n")
                found.append(json.loads(data.removeprefix("data: ")))
                assert name == f"event: {found[-1]['type']}"
        assert [event["sequence_number"] for event in found] == list(range(len(found)))
        return found


def reply_to(caller: Caller, save: Any = None) -> ResponseReply:
    response = new_response(read_request(b'{"input": "Hi"}'), "resp_0", stores=save is not None)
    return ResponseReply(caller, response, lambda _: None, save)  # type: ignore[arg-type]


def stream_of(chunks: list[dict[str, Any]], end: bytes = b"data: [DONE]\n\n") -> bytes:
    return b"".join(b"data: %b\n\n" % msgspec.json.encode(chunk) for chunk in chunks) + end


def streamed(*pieces: bytes) -> Caller:
    caller = Caller()
    reply = reply_to(caller)
    reply.start(content_type="text/event-stream")
    for piece in pieces:
        reply.write(piece)
    reply.end()
    asyncio.run(reply.complete())
    assert caller.ended
    return caller


def whole(message: Any, reason: str = "stop", **fields: Any) -> dict[str, Any]:
    caller = Caller()
    reply = reply_to(caller)
    body = {"model": "m", "choices": [{"message": message, "finish_reason": reason}], "usage": USAGE, **fields}
    reply.reply(msgspec.json.encode(body))
    assert not caller.ended, "nothing leaves before the response is stored"
    asyncio.run(reply.complete())
    return dict(json.loads(caller.body))


def without_times(response: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in response.items() if not name.endswith("_at")}


def test_whole_and_streamed_make_the_same_response() -> None:
    final = streamed(stream_of(chat_chunks(MESSAGE, "tool_calls"))).events[-1]
    assert final["type"] == "response.completed"
    expected = whole(MESSAGE, "tool_calls")
    assert without_times(final["response"]) == without_times(expected)
    assert [item["type"] for item in expected["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert [item["id"] for item in expected["output"]] == ["rs_0_0", "msg_0_1", "fc_0_2", "fc_0_3"]
    assert all(item["status"] == "completed" for item in expected["output"])


def test_a_stream_may_be_cut_anywhere() -> None:
    for end in (b"\n\n", b"\r\n\r\n"):
        raw = b": hello\n\n" + stream_of(chat_chunks(MESSAGE, "tool_calls")).replace(b"\n\n", end)
        expected = [without_times(event.get("response", event)) for event in streamed(raw).events]
        draw = random.Random(3)
        for size in (1, 2, 3, 7, 50):
            pieces = [raw[start : start + size] for start in range(0, len(raw), size)]
            told = streamed(*pieces)
            assert [without_times(event.get("response", event)) for event in told.events] == expected
            assert told.body.startswith(b": hello\n\n")
        cuts = sorted(draw.sample(range(len(raw)), 20))
        pieces = [raw[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
        assert [without_times(event.get("response", event)) for event in streamed(*pieces).events] == expected


def test_a_stream_that_ends_early_has_failed_wherever_it_ends() -> None:
    chunks = chat_chunks(MESSAGE, "tool_calls")
    for count in range(len(chunks) - 2):
        events = streamed(stream_of(chunks[:count], b"")).events
        kinds = [event["type"] for event in events]
        assert kinds[0] == "response.created" and kinds[-2:] == ["response.failed", "error"]
        response = events[-2]["response"]
        assert response["status"] == "failed" and "ended before it was complete" in response["error"]["message"]
        assert all(item["status"] in ("completed", "incomplete") for item in response["output"])
        assert not {"response.completed"} & set(kinds)


def test_an_error_event_ends_the_response() -> None:
    chunks = [
        *chat_chunks({"content": "Phnom"}, "stop")[:2],
        {"error": {"message": "messages are bad", "code": 500}},
        {"choices": []},
    ]
    events = streamed(stream_of(chunks)).events
    failed, error = events[-2:]
    assert failed["response"]["error"] == {"code": "server_error", "message": "input are bad"}
    assert error["message"] == "input are bad" and error["error"]["message"] == "input are bad"
    assert not [event for event in events if event["type"].endswith(".done")], "nothing of it is complete"


def test_an_empty_answer_is_a_message_without_text() -> None:
    (item,) = whole({"content": None})["output"]
    assert item["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
    events = streamed(stream_of([{"choices": [{"delta": {}, "finish_reason": "stop"}]}])).events
    assert [event["type"] for event in events][-1] == "response.completed"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""


def test_calls_that_come_mixed_are_right_at_last() -> None:
    pieces = [(0, "c0", "f", '{"a"'), (1, "c1", "g", '{"b"'), (0, None, None, ": 1}"), (1, None, None, ": 2}")]
    chunks = [
        {
            "choices": [
                {
                    "delta": {
                        "tool_calls": [{"index": index, "id": call_id, "function": {"name": name, "arguments": text}}]
                    }
                }
            ]
        }
        for index, call_id, name, text in pieces
    ]
    chunks.append({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]})
    final = streamed(stream_of(chunks)).events[-1]["response"]["output"]
    assert [(item["call_id"], item["name"], item["arguments"]) for item in final] == [
        ("c0", "f", '{"a": 1}'),
        ("c1", "g", '{"b": 2}'),
    ]


def test_a_name_that_comes_late_waits_with_its_arguments() -> None:
    deltas = [{"arguments": '{"a"'}, {"name": "f", "arguments": ": 1"}, {"arguments": "}"}]
    chunks = [{"choices": [{"delta": {"tool_calls": [{"index": 0, "function": delta}]}}]} for delta in deltas]
    events = streamed(stream_of(chunks)).events
    told = "".join(event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta")
    (item,) = events[-1]["response"]["output"]
    assert told == item["arguments"] == '{"a": 1}' and item["call_id"].startswith("call_")


@pytest.mark.parametrize(
    "message",
    [
        {"content": 5},
        {"content": [{"type": "text", "text": "a"}, 7]},
        {"tool_calls": "x"},
        {"tool_calls": [None, {}]},
        {"tool_calls": [{"function": "f"}]},
        {"tool_calls": [{"index": "a", "function": {"name": 4, "arguments": {}}}]},
        {"reasoning": []},
        {"refusal": {}},
        {"content": "x", "reasoning_content": 3},
    ],
)
def test_what_a_backend_sends_never_breaks_it(message: Any) -> None:
    assert whole(message)["status"] == "completed"
    odd: list[Any] = [
        {"choices": [{"delta": message, "logprobs": 3}]},
        {"choices": 5},
        {"choices": [None]},
        {"usage": 3, "model": 4},
        {"choices": [{"delta": "x", "finish_reason": 4}]},
        {"usage": {"prompt_tokens": "x"}, "warnings": 1},
    ]
    raw = stream_of(odd, b"data: not json\n\ndata: 7\n\ndata: [DONE]\n\n")
    assert streamed(raw).events[-1]["type"] == "response.completed"


def test_a_reply_that_is_no_chat_is_refused() -> None:
    for body in (b"", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{"message": null}]}', b"<html>"):
        with pytest.raises(UpstreamFailed, match="not a chat completion"):
            reply_to(Caller()).reply(body)


def test_too_much_text_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MAX_CHARS", 10)
    with pytest.raises(UpstreamError, match="more than 10 characters"):
        streamed(stream_of(chat_chunks({"content": "x" * 11}, "stop")))


def test_a_response_that_cannot_be_stored_says_so() -> None:
    async def save(response: dict[str, Any]) -> None:
        raise UpstreamFailed("no room")

    caller = Caller()
    reply = reply_to(caller, save)
    reply.reply(
        msgspec.json.encode({"choices": [{"message": {"content": "a"}}], "warnings": [{"param": "x", "message": "y"}]})
    )
    asyncio.run(reply.complete())
    response = json.loads(caller.body)
    assert response["store"] is False and response["status"] == "completed"
    assert [warning["param"] for warning in response["warnings"]] == ["x", "store"]
    assert response["warnings"][1]["message"] == "this response was not stored: no room"


def test_errors_speak_of_the_callers_fields() -> None:
    body = {
        "error": {
            "message": "response_format.json_schema.schema: bad",
            "param": "response_format.json_schema.schema",
            "code": "x",
        }
    }
    assert json.loads(renamed_error(json.dumps(body).encode()))["error"] == {
        "message": "text.format.schema: bad",
        "param": "text.format.schema",
        "code": "x",
    }
    for odd in (b"messages", b'{"error": "messages"}', b'["messages"]', b"\xff messages", b"{}"):
        assert renamed_error(odd) == odd
    assert error_of({"message": "max_tokens_per_doc is odd"})["message"] == "max_tokens_per_doc is odd"
    assert error_of("it broke")["message"] == "it broke"


def test_usage() -> None:
    assert usage_of(None) is None and usage_of([]) is None
    found = usage_of({"prompt_tokens": 3, "completion_tokens": "x", "prompt_tokens_details": 4})
    assert found is not None and (found["input_tokens"], found["output_tokens"], found["total_tokens"]) == (3, 0, 3)
