"""Deltas into parts: which are kept, and how many tokens were thought."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fakes.front import ByteText
from tonle.chat_formats.chat_format import ThinkingTags, Tool, ToolChoice
from tonle.chat_formats.parts import CallArguments, CallBegins, ContentText, Part, ReasoningText
from tonle.engine.request import Delta
from tonle.errors import ConfigError
from tonle.replica.answer_reading import AnswerReading
from tonle.replica.chat_style import chat_style
from tonle.replica.read_tools import ToolUse

TEMPLATE = "{{ tools }}<tool_call></tool_call><think></think>"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


class Templated(ByteText):
    tool_template = TEMPLATE


STYLE = chat_style(Templated())  # type: ignore[arg-type]
READING = AnswerReading(STYLE.format, None, ThinkingTags(), thinking_end=[*b"</think>"])


def read(reading: AnswerReading, *texts: str) -> tuple[list[Part], int]:
    """All parts, neighbours joined, and the tokens of thought. Tokens are bytes."""
    reader = reading.choice()
    parts: list[Part] = []
    for place, text in enumerate(texts):
        last = place == len(texts) - 1
        for part in reader.read(Delta(0, text, [*text.encode()], finish_reason="stop" if last else None)):
            if parts and isinstance(part, type(parts[-1])) and not isinstance(part, CallBegins):
                parts[-1] = replace(parts[-1], text=parts[-1].text + part.text)  # type: ignore[union-attr]
            else:
                parts.append(part)
    return parts, reader.reasoning_tokens


@pytest.mark.parametrize("pieces", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("text", "is_open", "parts", "num_tokens"),
    [
        ("Yes.", False, [ContentText("Yes.")], 0),
        ("<think>Hm.</think>Yes.", False, [ReasoningText("Hm."), ContentText("Yes.")], 18),
        ("Hm.</think>Yes.", True, [ReasoningText("Hm."), ContentText("Yes.")], 11),
        ("<think>On and on", False, [ReasoningText("On and on")], 16),
        ("On and on", True, [ReasoningText("On and on")], 9),
    ],
)
def test_thoughts_are_counted_however_they_come(
    text: str, is_open: bool, parts: list[Part], num_tokens: int, pieces: int
) -> None:
    size = -(-len(text) // min(pieces, len(text)))
    cut = [text[start : start + size] for start in range(0, len(text), size)]
    assert read(replace(READING, is_open=is_open), *cut) == (parts, num_tokens)


def test_an_end_in_other_tokens_than_expected_is_shared_out_by_length() -> None:
    reading = replace(READING, thinking_end=[1, 2, 3])
    _, num_tokens = read(reading, "<think>aaaaaaaaaa</think>bbbbbbbbbb")
    assert num_tokens == len("<think>aaaaaaaaaa</think>bbbbbbbbbb") // 2


def test_thoughts_that_are_not_shown_are_counted_all_the_same() -> None:
    assert read(replace(READING, shows_reasoning=False), "<think>Hm.</think>Yes.") == ([ContentText("Yes.")], 18)


def test_calls_beyond_the_first_where_one_is_wanted() -> None:
    use = ToolUse([Tool("f")], ToolChoice())
    begun = [CallBegins(0, "f"), CallArguments(0, '{"a": 1}')]
    assert read(replace(READING, use=use), f"{CALL}\n{CALL}")[0] == [
        *begun, CallBegins(1, "f"), CallArguments(1, '{"a": 1}'),
    ]  # fmt: skip
    use = ToolUse([Tool("f")], ToolChoice(parallel=False))
    assert read(replace(READING, use=use), f"{CALL}\n{CALL}")[0] == begun


class SpecialText(ByteText):
    """A tokenizer whose tags of calls are special tokens."""

    tool_template = "{{ tools }}[TOOL_CALLS]"
    special_tokens = {"[TOOL_CALLS]": 300, "</s>": 301, "<pad>": 302}  # noqa: RUF012


def test_special_tokens_that_are_no_tags_do_not_show() -> None:
    style = chat_style(SpecialText())  # type: ignore[arg-type]
    assert style.format.name == "mistral" and style.format.reads_special_tokens and style.thinking is None
    reading = AnswerReading(style.format, ToolUse([Tool("f")], ToolChoice()), unwanted=style.unwanted)
    assert read(reading, "Fine.<pad></s>")[0] == [ContentText("Fine.")]
    parts, _ = read(reading, '[TOOL_CALLS][{"name": "f", "arguments": {}}]</s>')
    assert parts == [CallBegins(0, "f"), CallArguments(0, "{}")]


def test_styles() -> None:
    assert (STYLE.format.name, STYLE.thinking, STYLE.renders_tools) == ("hermes", ThinkingTags(), True)
    plain = chat_style(ByteText())  # type: ignore[arg-type]
    assert (plain.format.name, plain.thinking, plain.renders_tools) == ("json", None, False)
    named = chat_style(Templated(), "llama3_json", "none")  # type: ignore[arg-type]
    assert (named.format.name, named.thinking) == ("llama3", None)
    for names in (("nothing", "auto"), ("auto", "nothing")):
        with pytest.raises(ConfigError, match="'nothing'; the names are auto"):
            chat_style(ByteText(), *names)  # type: ignore[arg-type]
