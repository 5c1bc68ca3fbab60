"""Ollama's API without a gateway: bodies in, lines out."""

from __future__ import annotations

import itertools
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gateway.scripted_chat import USAGE, call, pieces
from tonle.errors import InvalidRequest
from tonle.gateway.apis.ollama.call import served_name
from tonle.gateway.apis.ollama.reply import OllamaReply
from tonle.gateway.apis.ollama.request import OllamaChatRequest, OllamaEmbedRequest, chat_body, embed_body
from tonle.gateway.call import ReplyFacts
from tonle.gateway.refusals import UpstreamFailed
from tonle.protocol.parse import parse

USER = {"role": "user", "content": "hi"}
MESSAGE = {"content": "ភ្នំពេញ", "reasoning_content": "Hm.", "tool_calls": [call("f", '{"a": "ខ"}'), call("g", "")]}


def body_of(**fields: Any) -> dict[str, Any]:
    request, warnings = parse(msgspec.json.encode({"messages": [USER], "stream": False, **fields}), OllamaChatRequest)
    return chat_body(request, warnings)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
        ({"stream": None}, {"stream": True, "stream_options": {"include_usage": True}}),
        ({"options": {"num_predict": -1}}, {}),
        ({"options": {"num_predict": 3, "seed": 4, "min_p": 0.1}}, {"max_tokens": 3, "seed": 4, "min_p": 0.1}),
        ({"format": "", "tools": [], "keep_alive": -1}, {}),
        ({"think": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"think": "high"}, {"reasoning_effort": "high"}),
        ({"logprobs": True, "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
    ],
)
def test_fields(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert body_of(**fields) == {"messages": [USER], **expected}


@pytest.mark.parametrize(
    "fields", [{"options": {"num_predict": -3}}, {"format": 5}, {"format": "xml"}, {"think": "much"},
               {"tools": [{"function": {}}]},
               {"messages": [{"role": "robot"}]}, {"messages": [{**USER, "images": ["x"]}]}, {"options": []}],
)  # fmt: skip
def test_what_cannot_be_served_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        body_of(**fields)


def test_latest_is_the_tag_of_a_name_without_one() -> None:
    assert [served_name(name, {"a", "b:latest"}) for name in ("a", "a:latest", "b:latest", "c:latest", "a:7b")] == [
        "a", "a", "b:latest", "c:latest", "a:7b"]  # fmt: skip


class Written:
    """An exchange that keeps what is written."""

    request_id, path, elapsed_s = "r", "/api/chat", 0.5

    def __init__(self) -> None:
        self.written, self.ended, self.arrived_s = b"", False, time.monotonic()

    def write(self, piece: bytes) -> None:
        self.written += piece

    def reply(self, body: bytes, **_: Any) -> None:
        self.written = body

    def end(self) -> None:
        self.ended = True


def outlet_of(exchange: Written) -> OllamaReply:
    return OllamaReply(exchange, "chat", "m", ReplyFacts())  # type: ignore[arg-type]


def stream_of(finish: str = "tool_calls") -> bytes:
    chunks: list[dict[str, Any]] = [{"choices": [{"delta": delta}]} for delta in pieces(MESSAGE)]
    chunks += [{"choices": [{"delta": {}, "finish_reason": finish}]}, {"choices": [], "usage": USAGE}]
    return (
        b": queued\n\n"
        + b"".join(b"data: %b\n\n" % msgspec.json.encode(chunk) for chunk in chunks)
        + b"data: [DONE]\n\n"
    )


@given(st.lists(st.integers(0, 10_000), max_size=40))
@settings(max_examples=30, deadline=None)
def test_lines_say_what_the_whole_answer_says_however_the_stream_is_cut(cuts: list[int]) -> None:
    exchange, stream = Written(), stream_of()
    outlet = outlet_of(exchange)
    places = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    for start, end in itertools.pairwise(places):
        outlet.write(stream[start:end])
    outlet.end()
    *lines, last = [msgspec.json.decode(line) for line in exchange.written.splitlines()]
    assert exchange.ended and last["done"] and not any(line["done"] for line in lines)
    whole = Written()
    body = {"choices": [{"message": MESSAGE, "finish_reason": "tool_calls"}], "usage": USAGE}
    outlet_of(whole).reply(msgspec.json.encode(body))
    told = msgspec.json.decode(whole.written)
    for name in ("content", "thinking"):
        assert "".join(line["message"].get(name, "") for line in lines) == told["message"][name]
    assert [each for line in lines for each in line["message"].get("tool_calls", ())] == told["message"]["tool_calls"]
    assert {name: last[name] for name in ("eval_count", "prompt_eval_count", "done_reason")} == {
        name: told[name] for name in ("eval_count", "prompt_eval_count", "done_reason")}  # fmt: skip


@given(st.integers(0, 2000))
@settings(max_examples=30, deadline=None)
def test_a_stream_that_ends_anywhere_is_not_taken_for_a_whole_answer(place: int) -> None:
    stream, outlet = stream_of(), outlet_of(Written())
    outlet.write(stream[: place % stream.index(b'"finish_reason"')])
    with pytest.raises(UpstreamFailed, match="broke off"):
        outlet.end()


@pytest.mark.parametrize("kind", ["raw", "embed", "embeddings", "chat"])
@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"choices":[5]}', b'{"data":[5]}', b'{"data":5,"choices":5}', b"\xff"]
)
def test_an_answer_that_is_none_is_the_backends_failure(kind: Any, body: bytes) -> None:
    outlet = OllamaReply(Written(), kind, "m", ReplyFacts())  # type: ignore[arg-type]
    with pytest.raises(UpstreamFailed):
        outlet.reply(body)


def test_a_text_that_is_too_long_is_cut_unless_the_caller_says_not_to() -> None:
    for truncate, expected in ((None, -1), (True, -1), (False, None)):
        assert embed_body(OllamaEmbedRequest(input="x", truncate=truncate)).get("truncate_prompt_tokens") == expected
