"""Log-probabilities into wire shapes."""

from __future__ import annotations

import math

import msgspec
from tonle.replica.logprobs import LOWEST, CompletionScribe, chat_logprobs, prompt_logprobs

from tests.fakes.front import END, ByteText
from tonle.engine.request import TokenLogprob
from tonle.protocol.openai import PromptLogprob

TEXT = ByteText()


def test_json_never_sees_infinity() -> None:
    record = TokenLogprob(97, -math.inf, [(98, -math.inf)])
    (entry,) = chat_logprobs([record], TEXT).content
    assert entry.logprob == entry.top_logprobs[0].logprob == LOWEST
    piece = CompletionScribe(TEXT, skip_special_tokens=True).write([97], [record])
    assert piece.token_logprobs == [LOWEST] and piece.top_logprobs == [{"b": LOWEST, "a": LOWEST}]
    assert b"null" not in msgspec.json.encode(piece)


def test_chosen_token_outside_the_best() -> None:
    record = TokenLogprob(97, -5.0, [(98, -0.1), (99, -0.2)])
    assert prompt_logprobs([None, record], TEXT)[1] == {
        "97": PromptLogprob(-5.0, "a", None),
        "98": PromptLogprob(-0.1, "b", 1),
        "99": PromptLogprob(-0.2, "c", 2),
    }


def test_tokens_that_read_the_same() -> None:
    record = TokenLogprob(0x80, -0.1, [(0x80, -0.1), (0x81, -0.9)])
    piece = CompletionScribe(TEXT, skip_special_tokens=True).write([0x80], [record])
    assert piece.top_logprobs == [{"\ufffd": -0.1}]


def test_offsets_run_on_over_pieces() -> None:
    for skip, width in ((True, 0), (False, len("<end>"))):
        scribe = CompletionScribe(TEXT, skip_special_tokens=skip)
        tokens = [*"ក".encode(), END, 97, 98]
        offsets = [scribe.write([token], [None]).text_offset[0] for token in tokens]
        assert offsets == [0, 0, 0, 1, 1 + width, 2 + width]
