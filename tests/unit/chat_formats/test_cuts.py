"""However an answer is cut, the same is read of it; and nothing of a text without calls is lost."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.chat_formats.examples import TOOLS, VARIANTS, joined, read, variant
from tonle.chat_formats import ThinkingTags, Tool, find_format
from tonle.chat_formats.find import FORMATS

_WRITTEN = [
    chat_format.write_calls(calls)
    for chat_format in map(variant, VARIANTS)
    for calls in (
        [("get_weather", {"city": 'a "b" \\ \n é', "days": [1, None, {"x": True}]})],
        [("now", {}), ("soon", {})],
    )
]
_PIECES = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "now", "arguments": {', '"a": "\\u00e9\\ud83d\\ude00"', "}}",
    '{"arguments": "{\\"a\\": 1}", "name": "now"}', "[", "]", "{", "}", '"', "\\", "\n", " ", ", ", "; ", "```json\n", "```",
    "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "functools[", "<start_function_call>", "call:now{", "<escape>",
    "<function=now>", "<parameter=a>\n", "\n</parameter>\n", "</function>", "[now(", "a='b", "=3)", "<|channel|>", "analysis",
    "<|message|>", "<|end|>", "<|start|>assistant", " to=functions.now", "<", "text ", "ភាសា", "🇰🇭", "now",
]  # fmt: skip
_TEXTS = st.lists(st.one_of(st.sampled_from(_PIECES), st.sampled_from(_WRITTEN), st.text(max_size=3)), max_size=12).map(
    "".join
)


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=20, deadline=None)
@given(text=_TEXTS, cuts=st.lists(st.integers(0, 400), max_size=8), is_open=st.booleans())
def test_any_cut_reads_the_same(name: str, text: str, cuts: list[int], is_open: bool) -> None:
    chat_format = variant(name)
    thinking = chat_format.thinking or ThinkingTags()
    places = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    pieces = [text[begin:end] for begin, end in itertools.pairwise(places)]
    whole = joined(read(chat_format, text, thinking=thinking, is_open=is_open))
    assert joined(read(chat_format, pieces, thinking=thinking, is_open=is_open)) == whole
    assert joined(read(chat_format, list(text), thinking=thinking, is_open=is_open)) == whole


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "gpt_oss"])
@settings(max_examples=20, deadline=None)
@given(text=_TEXTS)
def test_a_text_without_calls_is_content(name: str, text: str) -> None:
    others = [Tool("a_tool_that_is_not_called")]
    parts = joined(read(find_format(None, name), list(text), others))
    assert parts == ([("text", text)] if text else [])


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=6,
)  # fmt: skip


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "mistral-new", "phi4", "gemma", "gpt_oss", "json"])
@settings(max_examples=20, deadline=None)
@given(values=st.dictionaries(st.text(), _VALUES, max_size=4), size=st.integers(1, 9))
def test_arguments_are_as_the_model_wrote_them(name: str, values: dict[str, object], size: int) -> None:
    text = variant(name).write_calls([("get_weather", values)])
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert joined(read(variant(name), pieces, TOOLS)) == [
        ("call", ["get_weather", json.dumps(values, ensure_ascii=False)])
    ]
