from __future__ import annotations

from tonle.cli import screen
from tonle.cli.answer_options import summary
from tonle.cli.backends import AnswerStats


def test_a_models_words_cannot_give_orders_to_a_terminal() -> None:
    assert screen.harmless("a\x1b[2Jb\x07\x9b1m\r\n\tc ខ្មែរ") == "a[2Jb1m\n\tc ខ្មែរ"


def test_sizes_and_durations() -> None:
    assert [screen.size(n) for n in (0, 999, 98_362_432, 3_100_000_000)] == ["0 B", "999 B", "98.4 MB", "3.1 GB"]
    assert [screen.duration(s) for s in (0.0421, 0.9, 1.25, 61)] == ["42 ms", "900 ms", "1.2 s", "61.0 s"]


def answered(**more: object) -> AnswerStats:
    return AnswerStats(10.0, 10.5, 12.5, prompt_tokens=20, completion_tokens=101, finish_reason="stop", **more)  # type: ignore[arg-type]


def test_summary_counts_what_a_reader_sees() -> None:
    assert answered().tokens_per_s == 50.0  # the first token belongs to the waiting
    assert summary(answered(context_length=8192)) == (
        "101 tokens · 50.0 tok/s · first token after 500 ms · context 121 of 8192"
    )


def test_summary_says_why_an_answer_is_short() -> None:
    cut = answered()
    cut.finish_reason = "length"
    cut.max_tokens = 101
    assert summary(cut).endswith("cut off at max_tokens 101")
    cut.context_length = 121
    assert summary(cut).endswith("cut off: the context is full")
    cut.finish_reason = None
    assert summary(cut).endswith("stopped")


def test_summary_admits_what_it_does_not_know() -> None:
    assert summary(AnswerStats(exact=False, finish_reason="stop")) == "0 pieces"
