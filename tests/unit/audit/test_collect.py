"""Replies are understood however they are cut, and passed on byte for byte."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tonle.audit import Answer, Collector, ask_for_usage

STREAM = "text/event-stream; charset=utf-8"
USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


def event(**body: Any) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


def chunk(text: str | None = None, *, index: int = 0, finish: str | None = None, **more: Any) -> bytes:
    delta = {} if text is None else {"content": text}
    return event(
        id="chatcmpl-1", model="river", choices=[{"index": index, "delta": delta, "finish_reason": finish}], **more
    )


USAGE_CHUNK = event(id="chatcmpl-1", model="river", choices=[], usage=USAGE)
DONE = b"data: [DONE]\n\n"
CHAT = chunk("") + chunk("សួ") + b": keep-alive\n\n" + chunk("ស្តី") + chunk(finish="stop") + USAGE_CHUNK + DONE


def feed(stream: bytes, size: int, **options: Any) -> tuple[bytes, Answer]:
    collector = Collector(STREAM, **options)
    passed = b"".join(collector.feed(stream[start : start + size]) for start in range(0, len(stream), size))
    passed += collector.rest()
    return passed, collector.finish()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 100_000])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_a_stream_cut_anywhere(size: int, line_end: bytes) -> None:
    stream = CHAT.replace(b"\n", line_end)
    passed, answer = feed(stream, size)
    assert passed == stream
    assert answer.text == "សួស្តី"
    assert answer.finish_reason == "stop"
    assert answer.usage == USAGE
    assert (answer.response_id, answer.model) == ("chatcmpl-1", "river")
    assert answer.complete
    assert answer.first_s is not None
    assert answer.last_s is not None
    assert answer.first_s <= answer.last_s


@pytest.mark.parametrize("size", [1, 5, 64, 100_000])
def test_usage_nobody_asked_for_is_taken_out(size: int) -> None:
    plain = chunk("a") + b": note\n\n" + chunk("b", finish="stop") + DONE
    told = chunk("a", usage=None) + b": note\n\n" + chunk("b", finish="stop", usage=None) + USAGE_CHUNK + DONE
    passed, answer = feed(told, size, swallow_usage=True)
    assert passed == plain
    assert answer.usage == USAGE


def test_every_complete_event_leaves_at_once() -> None:
    collector = Collector(STREAM, swallow_usage=True)
    for text in "abc":
        whole = chunk(text)
        assert collector.feed(whole[:10]) == b""
        assert collector.feed(whole[10:]) == whole


def test_what_is_held_back_at_the_end_is_passed_on() -> None:
    cut = chunk("a") + chunk("b")[:30]
    passed, answer = feed(cut, 7, swallow_usage=True)
    assert passed == cut
    assert answer.text == "a"
    assert not answer.complete


def test_text_that_looks_like_usage_stays() -> None:
    tricky = chunk('x,"usage":null, "usage": null', finish="stop") + DONE
    passed, answer = feed(tricky, 9, swallow_usage=True)
    assert passed == tricky
    assert answer.text == 'x,"usage":null, "usage": null'


def test_several_choices_tools_and_thoughts() -> None:
    call = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"a'}}
    more = {"index": 0, "function": {"arguments": '":1}'}}
    stream = chunk("one") + chunk("two", index=1, finish="length")
    stream += event(choices=[{"index": 2, "delta": {"tool_calls": [call]}}]) + event(
        choices=[{"index": 2, "delta": {"tool_calls": [more]}}]
    )
    stream += event(choices=[{"index": 0, "delta": {"reasoning_content": "hm"}}])
    _, answer = feed(stream, 11)
    assert [answer.choices[index].text for index in (0, 1)] == ["one", "two"]
    assert answer.choices[1].finish_reason == "length"
    assert answer.choices[0].reasoning == ["hm"]
    assert answer.choices[2].tool_calls[0]["function"] == {"name": "look", "arguments": '{"a":1}'}


def test_an_error_inside_a_stream() -> None:
    _, answer = feed(chunk("par") + event(error={"message": "engine died", "code": 500}) + DONE, 13)
    assert answer.text == "par"
    assert answer.error == {"message": "engine died", "code": 500}


@pytest.mark.parametrize("junk", [b"data: {broken\n\n", b"data: 3\n\n", b"event: ping\n\n", b"data:\n\n", b"\n\n\n\n",
                                  b'data: {"choices": 3}\n\n',
                                  b'data: {"choices": [{"delta": {"content": 3}}]}\n\n'])  # fmt: skip
def test_junk_in_a_stream_is_passed_on_and_over(junk: bytes) -> None:
    for swallow in (False, True):
        passed, answer = feed(chunk("a") + junk + chunk("b") + DONE, 10, swallow_usage=swallow)
        assert passed == chunk("a") + junk + chunk("b") + DONE
        assert answer.text == "ab"


def whole(body: bytes, content_type: str = "application/json") -> Answer:
    collector = Collector(content_type)
    for start in range(0, len(body), 10):
        piece = body[start : start + 10]
        assert collector.feed(piece) == piece
    return collector.finish()


def test_whole_replies() -> None:
    message = {"role": "assistant", "content": "សួស្តី"}
    chat = {
        "id": "c-1",
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": USAGE,
    }
    answer = whole(json.dumps(chat).encode())
    assert (answer.text, answer.finish_reason, answer.usage, answer.complete) == ("សួស្តី", "stop", USAGE, True)
    plain = {"id": "c-2", "choices": [{"index": 0, "text": "a"}, {"index": 1, "text": "b"}]}
    assert [choice.text for choice in whole(json.dumps(plain).encode()).choices.values()] == ["a", "b"]
    assert whole(b'{"error": {"message": "no"}}').error == {"message": "no"}
    assert whole(b"<html>bad gateway</html>", "text/html").raw == "<html>bad gateway</html>"
    assert whole(b'{"object": "list", "data": []}').raw == {"object": "list", "data": []}


def test_streams_of_other_protocols() -> None:
    responses = event(type="response.created", response={"id": "r-1", "model": "m"})
    responses += event(type="response.output_text.delta", delta="he") + event(
        type="response.output_text.delta", delta="y"
    )
    responses += event(type="response.completed", response={"usage": {"input_tokens": 3, "output_tokens": 2}})
    _, answer = feed(responses, 17)
    assert (answer.text, answer.response_id, answer.complete) == ("hey", "r-1", True)
    assert answer.usage == {"input_tokens": 3, "output_tokens": 2}
    messages = event(type="message_start", message={"id": "m-1", "usage": {"input_tokens": 3}})
    messages += event(type="content_block_delta", delta={"type": "text_delta", "text": "hey"})
    messages += event(type="message_delta", usage={"output_tokens": 2}) + event(type="message_stop")
    _, answer = feed(messages, 17)
    assert (answer.text, answer.usage) == ("hey", {"input_tokens": 3, "output_tokens": 2})


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        (
            b'{"stream": true, "seed": 12345678901234567890}\n',
            b'{"stream": true, "seed": 12345678901234567890,"stream_options":{"include_usage":true}}',
        ),
        (b'{"stream":true,"stream_options":null}', b'{"stream":true,"stream_options":{"include_usage":true}}'),
        (
            b'{"stream":true,"stream_options":{"include_usage":false,"x":1}}',
            b'{"stream":true,"stream_options":{"include_usage":true,"x":1}}',
        ),
        (b'{"stream":true,"stream_options":{"include_usage":true}}', None),
        (b'{"stream":true,"stream_options":3}', None),
        (b'{"stream":false}', None),
        (b'{"stream":"true"}', None),
        (b"{}", None),
        (b"[1]", None),
        (b"nonsense", None),
        (b"\xff", None),
    ],
)  # fmt: skip
def test_asking_for_usage(body: bytes, changed: bytes | None) -> None:
    assert ask_for_usage(body) == changed
