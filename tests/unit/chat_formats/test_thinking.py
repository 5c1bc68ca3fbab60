"""Thoughts are told apart from what follows them."""

from __future__ import annotations

import pytest

from tests.unit.chat_formats.examples import joined, read
from tonle.chat_formats import ThinkingTags, find_format, find_thinking, opens_thinking
from tonle.errors import ConfigError

_TAGS = ThinkingTags()
_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nHm. \n</think>\n\nYes. \n", False, [("thought", "Hm."), ("text", "Yes. \n")]),
        ("\n<think>Hm</think>Yes", False, [("thought", "Hm"), ("text", "Yes")]),
        ("<think>\n\n</think>\n\nYes", False, [("text", "Yes")]),
        ("No thought", False, [("text", "No thought")]),
        ("Hm\n</think>\n\nYes", True, [("thought", "Hm"), ("text", "Yes")]),
        ("<think>Hm</think>Yes", True, [("thought", "Hm"), ("text", "Yes")]),  # the prompt's tag is repeated
        ("Never closed", True, [("thought", "Never closed")]),
        ("<think>Never closed \n", False, [("thought", "Never closed")]),
        ("Late. <think>Hm</think> Yes", False, [("text", "Late. "), ("thought", "Hm"), ("text", "Yes")]),
        ("<think>a</think>b<think>c</think>", False, [("thought", "a"), ("text", "b<think>c</think>")]),
        ("<think>a </thin k> b</think>c", False, [("thought", "a </thin k> b"), ("text", "c")]),
        ("a</think>b", False, [("text", "a</think>b")]),
        ("<think>a</thi", False, [("thought", "a</thi")]),
    ],
)  # fmt: skip
def test_thoughts(text: str, is_open: bool, expected: list[tuple[str, str]]) -> None:
    for pieces in (text, list(text)):
        assert joined(read(find_format(None), pieces, [], _TAGS, is_open=is_open)) == expected


def test_calls_are_found_after_thoughts_and_not_in_them() -> None:
    text = f"<think>I could write {_CALL}</think>\n\nNow:\n{_CALL}\n"
    thought, content, call = joined(read(find_format(None, "hermes"), text, thinking=_TAGS))
    assert thought == ("thought", f"I could write {_CALL}")
    assert (content, call) == (("text", "Now:"), ("call", ["now", "{}"]))


def test_thoughts_are_content_if_they_are_not_asked_for() -> None:
    assert joined(read(find_format(None), "<think>Hm</think> Yes", [])) == [("text", "<think>Hm</think> Yes")]


@pytest.mark.parametrize(
    ("template", "start"),
    [
        ("{{ '<think>\\n' }}", "<think>"),
        ("{% if '</think>' in content %}", "<think>"),
        ("[THINK]", "[THINK]"),
        ("<thinking>", "<thinking>"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "<|channel|>analysis<|message|>"),
        ("<|user|>Hi<|end|>", None),
        ("{{ messages }}", None),
        (None, None),
    ],
)  # fmt: skip
def test_tags_in_the_template(template: str | None, start: str | None) -> None:
    tags = find_thinking(template)
    assert (tags.start if tags else None) == start


def test_tags_by_name() -> None:
    assert find_thinking(None, "deepseek_r1") == find_thinking("", "qwen3") == _TAGS
    assert find_thinking("<think>", "none") is None
    assert find_thinking(None, "openai_gptoss") == find_format(None, "gpt_oss").thinking
    with pytest.raises(ConfigError, match=r"no reasoning format 'deep'; the names are auto, gpt_oss, .*deepseek_r1"):
        find_thinking(None, "deep")


@pytest.mark.parametrize(
    ("tail", "is_open"),
    [
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<think>a</think>b<|im_end|>assistant\n<think>", True),
    ],
)  # fmt: skip
def test_a_prompt_that_ends_inside_of_a_thought(tail: str, is_open: bool) -> None:
    assert opens_thinking(tail, _TAGS) is is_open
