"""Prompts that fit, by the tokens of the chat template."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.checkpoints import tiny_tokenizer
from tonle.engine.text import Text
from tonle.errors import ContextOverflow
from tonle.inference_optimizer.prompt import PromptBuilder, conversation

TEXT = Text.from_live(tiny_tokenizer())
TEXT.max_tokens = 1024


def builder(max_context_length: int | None = 2048, window: int | None = 10, context: int = 1024) -> PromptBuilder:
    return PromptBuilder(TEXT, context_length=context, max_context_length=max_context_length, window=window)


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


turns = st.lists(
    st.tuples(st.text("ab ខ្", max_size=40), st.lists(st.text("cd", max_size=40), max_size=2)).map(
        lambda turn: [message("user", turn[0]), *(message("assistant", text) for text in turn[1])]
    ),
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(turns, st.sampled_from(["", "Be kind."]), st.integers(40, 300), st.none() | st.integers(1, 8))
def test_a_prompt_has_the_most_turns_that_fit(
    talked: list[list[dict[str, Any]]], system: str, limit: int, window: int | None
) -> None:
    history = [each for turn in talked for each in turn]
    talk = conversation("Why?", history, system)
    prompt = builder(limit, window).build(talk, max_tokens=10)
    instructions = [message("system", system)] if system else []
    kept = history[prompt.history_dropped :]
    assert prompt.tokens == TEXT.encode_chat([*instructions, *kept, message("user", "Why?")])
    assert len(prompt.tokens) <= limit and (window is None or len(kept) <= window)
    assert not kept or kept[0]["role"] == "user"
    assert (prompt.truncation is None) == (prompt.history_dropped == 0)
    if prompt.history_dropped:
        dropped_turns = next(n for n in range(len(talked) + 1) if sum(map(len, talked[:n])) == prompt.history_dropped)
        more = [*talked[dropped_turns - 1], *kept]
        too_long = len(TEXT.encode_chat([*instructions, *more, message("user", "Why?")])) > limit
        assert too_long or (window is not None and len(more) > window)


def test_the_reason_is_told() -> None:
    history = [message("user", "a " * 50), message("assistant", "b " * 50)] * 3
    by_tokens = builder(300).build(conversation("Why?", history, None), max_tokens=10)
    assert by_tokens.truncation == "the oldest 4 messages of the history (2 turns) left out: max_context_length is 300"
    by_context = builder(None, context=400).build(conversation("Why?", history, None), max_tokens=100)
    assert by_context.truncation is not None
    assert by_context.truncation.endswith(
        "the context of 400 tokens (max_sequence_length, and the model's) less max_tokens=100 leaves 300"
    )
    both = builder(300, window=4).build(conversation("Why?", history, None), max_tokens=10)
    assert both.truncation is not None and "context_window is 4; max_context_length is 300" in both.truncation


@pytest.mark.parametrize(
    ("question", "system", "limit", "said"),
    [("x " * 200, None, 100, r"user_input is too long: its prompt has \d+ tokens, and max_context_length is 100"),
     ("x " * 50, "y " * 60, 150, r"\d+ tokens together with the system message, and max_context_length is 150"),
     ("x " * 500, None, None, r"the context of 1024 tokens .* less max_tokens=100 leaves 924; shorten it"),
     ("x " * 100_000, None, 2048, r"user_input is too long: .*the model's context is 1024 tokens")],
)  # fmt: skip
def test_a_question_is_never_cut(question: str, system: str | None, limit: int | None, said: str) -> None:
    with pytest.raises(ContextOverflow, match=said) as caught:
        builder(limit).build(conversation(question, [message("user", "old")], system), max_tokens=100)
    assert caught.value.param == "user_input"


def test_a_history_too_long_to_tokenize_is_left_out() -> None:
    history = [message("user", "x " * 200_000), message("user", "short")]
    assert builder().build(conversation("Why?", history, None), max_tokens=10).history_dropped == 1
