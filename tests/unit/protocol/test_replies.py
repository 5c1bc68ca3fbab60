"""Replies of many servers: events cut anywhere, content in parts, errors, model lists."""

from __future__ import annotations

import random

import msgspec
import pytest

from tonle.protocol.answers import Collector
from tonle.protocol.replies import EventReader, Reply, body_message, content_text, error_text, read_models

STREAM = (
    b": a comment\n\n"
    b'data: {"id": "1", "choices": [{"delta": {"content": "a"}}]}\n\n'
    b'data:{"choices": [{"text": "\\u1791\xe1\x9e\x93", "token_ids": [7]}]}\r\n\r\n'
    b'event: x\ndata: {"choices": [{"delta": {"content": [{"type": "text", "text": "b"}]},\n'
    b'data: "finish_reason": "stop"}]}\n\n'
    b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\ndata: [DONE]\n\n'
)


def read(pieces: list[bytes]) -> tuple[list[Reply], EventReader]:
    reader = EventReader()
    replies = [reply for piece in pieces for reply in reader.feed(piece)]
    return replies + reader.finish(), reader


@pytest.mark.parametrize("seed", range(30))
def test_where_the_stream_is_cut_does_not_matter(seed: int) -> None:
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, len(STREAM)), rng.choice([0, 1, 5, 100])))
    replies, reader = read([STREAM[a:b] for a, b in zip([0, *cuts], [*cuts, len(STREAM)], strict=True)])
    assert len(replies) == 4
    choices = [reply.choices[0] for reply in replies[:3] if reply.choices]
    assert choices[0].delta is not None and choices[0].delta.content == "a"
    assert (choices[1].text, choices[1].token_ids) == ("ទន", [7])
    assert choices[2].delta is not None and choices[2].delta.content == [{"type": "text", "text": "b"}]
    assert choices[2].finish_reason == "stop"
    assert replies[3].usage == {"completion_tokens": 3}
    assert reader.done and reader.problem is None


def test_several_events_at_once_are_the_same_as_one_by_one() -> None:
    events = [b'data: {"id": "%d"}\n\n' % index for index in range(5)] + [b"data: [DONE]\n\n"]
    for pieces in (events, [b"".join(events)], [b"".join(events[:2]), b"".join(events[2:])]):
        replies, reader = read(pieces)
        assert [reply.id for reply in replies] == ["0", "1", "2", "3", "4"] and reader.done


def test_an_unreadable_event_is_a_problem_and_the_others_are_read() -> None:
    replies, reader = read([b'data: {"id": "1"}\n\ndata: {oops\n\ndata: {"choices": 3}\n\ndata: {"id": "2"}\n\n'])
    assert [reply.id for reply in replies] == ["1", "2"]
    assert reader.problem is not None and "malformed" in reader.problem


def test_the_last_event_counts_without_its_empty_line_and_half_an_event_does_not() -> None:
    replies, reader = read([b'data: {"id": "1"}\n\ndata: {"id": "2"}'])
    assert [reply.id for reply in replies] == ["1", "2"]
    replies, reader = read([b'data: {"id": "1"}\n\ndata: {"id": "'])
    assert [reply.id for reply in replies] == ["1"] and reader.problem is None


def test_content_in_parts() -> None:
    assert content_text("plain") == "plain"
    assert content_text([{"type": "text", "text": "a"}, {"type": "image"}, "b", 3]) == "ab"
    collector = Collector("application/json")
    collector.feed(b'{"choices": [{"message": {"content": [{"type": "text", "text": "a"}]}}]}')
    assert collector.finish().text == "a"


@pytest.mark.parametrize("events", [
    [{"type": "response.created", "response": {"id": "r", "model": "m"}},
     {"type": "response.output_text.delta", "delta": "Hi"},
     {"type": "response.completed", "response": {"id": "r", "usage": {"output_tokens": 3}}}],
    [{"type": "message_start", "message": {"id": "r", "model": "m", "usage": {"input_tokens": 9}}},
     {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hi"}},
     {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}},
     {"type": "message_stop"}],
], ids=["responses", "messages"])  # fmt: skip
def test_streams_of_other_endpoints(events: list[dict[str, object]]) -> None:
    collector = Collector("text/event-stream")
    for event in events:
        collector.feed(b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode(), msgspec.json.encode(event)))
    answer = collector.finish()
    assert (answer.text, answer.response_id, answer.model, answer.complete) == ("Hi", "r", "m", True)
    assert answer.usage is not None and answer.usage["output_tokens"] == 3


def test_model_lists() -> None:
    body = b'{"object": "list", "data": [{"id": "a", "created": null, "owned_by": null, "more": 1}, {"id": "b"}]}'
    assert [model.id for model in read_models(body)] == ["a", "b"]
    for wrong in (b"", b"[]", b'{"data": [{}]}', b"<html>"):
        with pytest.raises(msgspec.MsgspecError):
            read_models(wrong)


def test_error_messages_become_one_printable_line() -> None:
    assert error_text({"error": {"message": "a\n\tb\x1b[31m  c"}}) == "a b [31m c"
    assert error_text({"error": "plain"}) == "plain"
    assert error_text({"code": 3}) == "{'code': 3}"
    assert len(error_text("x" * 5000)) < 400


@pytest.mark.parametrize("body", [b'{"error": {"message": "no"}}', b'{"detail": "no"}', b"no", b'"no"'])
def test_the_message_of_a_body(body: bytes) -> None:
    assert body_message(body) == "no"


def test_a_body_that_is_no_text_has_a_message() -> None:
    assert body_message(b'"\xff\xfe"') == '"\ufffd\ufffd"'
