"""Event streams of many makes, cut anywhere."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonle.bench.answer_stream import StreamedAnswer


def data(document: Any) -> bytes:
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"


def completion(text: str, **more: Any) -> bytes:
    return data({"id": "cmpl-1", "object": "text_completion", "choices": [{"index": 0, "text": text} | more]})


def chat(delta: dict[str, Any], **more: Any) -> bytes:
    return data({"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta} | more]})


USAGE = data({
    "choices": [],
    "usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}},
})  # fmt: skip
DONE = b"data: [DONE]\n\n"

STREAM = (
    b": a comment\n\n"
    + completion(" ទន្លេ")
    + completion("")
    + completion("b\n\ndata: [DONE]")
    + completion("", finish_reason="length")
    + USAGE
    + DONE
)


def read(stream: bytes) -> StreamedAnswer:
    answer = StreamedAnswer()
    answer.feed(stream, 1.0)
    return answer


@given(st.sets(st.integers(1, len(STREAM) - 1)))
def test_where_the_network_cuts_does_not_matter(cuts: set[int]) -> None:
    answer = StreamedAnswer()
    edges = [0, *sorted(cuts), len(STREAM)]
    for moment, (begin, end) in enumerate(itertools.pairwise(edges)):
        answer.feed(STREAM[begin:end], float(moment))
    assert len(answer.arrivals_s) == 2
    assert answer.arrivals_s == sorted(answer.arrivals_s)
    assert answer.finish_reason == "length"
    assert answer.done
    assert answer.failure is None
    assert answer.count_output() == (3, "usage")
    assert (answer.prompt_tokens, answer.cached_tokens) == (9, 8)


def test_each_chunk_gets_the_moment_its_end_arrived() -> None:
    answer = StreamedAnswer()
    first = completion("a")
    answer.feed(first[:10], 1.0)
    answer.feed(first[10:] + completion("b"), 2.0)
    answer.feed(completion("", finish_reason="stop"), 3.0)
    answer.feed(USAGE + DONE, 4.0)
    assert answer.arrivals_s == [2.0, 2.0]
    assert answer.last_s == 3.0


def test_the_opening_role_chunk_is_not_a_token() -> None:
    answer = StreamedAnswer()
    answer.feed(chat({"role": "assistant", "content": ""}), 1.0)
    answer.feed(chat({"content": "Hi"}), 2.0)
    assert answer.arrivals_s == [2.0]


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "x"},
        {"reasoning_content": "x"},
        {"reasoning": "x"},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
    ],
)
def test_everything_a_model_can_say_counts(delta: dict[str, Any]) -> None:
    assert read(chat(delta)).arrivals_s == [1.0]


def test_token_ids_count_before_their_text_is_visible() -> None:
    answer = read(completion("", token_ids=[7]) + completion("é", token_ids=[8, 9]) + DONE)
    assert len(answer.arrivals_s) == 2
    assert answer.count_output() == (3, "token_ids")


def test_without_usage_chunks_are_counted() -> None:
    answer = read(completion("a") + completion("bc") + DONE)
    assert answer.count_output() == (2, "chunks")
    assert answer.prompt_tokens is None
    assert answer.cached_tokens is None


def test_llama_servers_cache_count() -> None:
    timings = data({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1}, "timings": {"cache_n": 5}})
    assert read(timings).cached_tokens == 5


def test_carriage_returns_and_missing_spaces() -> None:
    answer = read(b'data:{"choices":[{"text":"a"}]}\r\n\r\nevent: x\r\ndata:[DONE]\r\n\r\n')
    assert answer.arrivals_s == [1.0]
    assert answer.done
    assert answer.failure is None


def test_an_error_in_the_stream_is_a_failure() -> None:
    answer = read(completion("a") + data({"error": {"message": "engine died", "code": 500}}) + DONE)
    assert answer.failure == "error in stream: engine died"


def test_garbage_is_a_failure_and_does_not_raise() -> None:
    answer = read(b"data: {oops\n\n" + b'data: {"choices": 3}\n\n')
    assert answer.failure is not None
    assert answer.failure.startswith("unreadable answer: ")


def test_complete_needs_a_word_from_the_server() -> None:
    assert not read(completion("a")).complete
    assert read(completion("a", finish_reason="stop")).complete
    assert read(DONE).complete
