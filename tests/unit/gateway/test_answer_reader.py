"""A tap learns the same as a collector that reads everything at once, however the stream is cut."""

from __future__ import annotations

import random

import msgspec
import pytest

from tonle.gateway.answer_reader import AnswerReader
from tonle.protocol.answers import Collector


def stream(num_words: int) -> bytes:
    chunks = [{"id": "c", "model": "m", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}]
    chunks += [{"choices": [{"index": 0, "delta": {"content": f'word{index} "usage" '}}]} for index in range(num_words)]
    chunks += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]
    chunks += [{"choices": [], "usage": {"total_tokens": 9}}]
    return b"".join(b"data: %b\n\n" % msgspec.json.encode(chunk) for chunk in chunks) + b"data: [DONE]\n\n"


@pytest.mark.parametrize("swallow", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_however_it_is_cut(seed: int, *, swallow: bool) -> None:
    rng, whole = random.Random(seed), stream(40)
    cuts = sorted(rng.sample(range(1, len(whole)), rng.choice([3, 30, 300])))
    if seed % 2:  # at the ends of events, as servers send them
        cuts = [whole.index(b"\n\n", cut) + 2 for cut in cuts if b"\n\n" in whole[cut:]]
    pieces = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    tap, collector = (
        AnswerReader("text/event-stream", swallow_usage=swallow),
        Collector("text/event-stream", swallow_usage=swallow),
    )
    passed = b"".join(tap.feed(piece) for piece in pieces if piece) + tap.rest()
    assert passed == collector.feed(whole) + collector.rest()
    ours, theirs = tap.finish(), collector.finish()
    assert (ours.text, ours.usage, ours.complete, ours.finish_reason) == (
        theirs.text, theirs.usage, theirs.complete, theirs.finish_reason)  # fmt: skip
    assert ours.first_s is not None and ours.last_s is not None and ours.first_s <= ours.last_s


def test_a_long_stream_is_not_kept_unread() -> None:
    tap = AnswerReader("text/event-stream")
    for _ in range(100):
        tap.feed(stream(40))
        assert tap._size <= 64 * 1024 + len(stream(40))
    assert tap.answer.text.count("word39") == 100
