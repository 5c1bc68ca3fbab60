"""Each field that says what an answer must be, and what it becomes."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer

from tonle.engine.request import StructuredOutput
from tonle.errors import InvalidRequest
from tonle.protocol.openai import ChatRequest
from tonle.protocol.parse import parse
from tonle.protocol.structured_fields import StructuredFields
from tonle.replica.read_structured import MAX_BAD_WORDS, read_structured

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"triggers": ["<f="], "structures": [{"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"}]}


def read(**fields: Any) -> StructuredOutput | None:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    found = read_structured(parse(msgspec.json.encode(body), ChatRequest)[0])
    if found is None:
        return None
    assert found.param in fields
    return found.output


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            {"json": SCHEMA},
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, {"json": {}}),
        ({"response_format": {"type": "structural_tag", **TAG}}, {"structural_tag": {"type": "structural_tag", **TAG}}),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            {"structural_tag": {"type": "structural_tag", "format": {"type": "any_text"}}},
        ),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json": "{}"}}, {"json": "{}"}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": "start: /a/"}}, {"grammar": "start: /a/"}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"structured_outputs": {"json_object": False, "regex": "a"}}, {"regex": "a"}),
        ({"structured_outputs": {"structural_tag": '{"triggers": []}'}}, {"structural_tag": {"triggers": []}}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"guided_grammar": "root ::= [0-9]"}, {"grammar": "root ::= [0-9]"}),
        ({"guided_json_object": True}, {"json_object": True}),
        ({"guided_json_object": False}, None),
        ({"json_schema": '{"type": "object"}'}, {"json": '{"type": "object"}'}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"ebnf": "root ::= [0-9]"}, {"grammar": "root ::= [0-9]"}),
        ({"grammar": "root ::= [0-9]"}, {"grammar": "root ::= [0-9]"}),
        ({"structural_tag": TAG}, {"structural_tag": TAG}),
        ({"bad_words": []}, None),
        ({"allowed_token_ids": []}, None),
        ({"response_format": {"type": "text"}, "regex": "a"}, {"regex": "a"}),
    ],
)
def test_fields(fields: dict[str, Any], expected: dict[str, Any] | None) -> None:
    assert read(**fields) == (None if expected is None else StructuredOutput(**expected))


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema", "missing"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "structures and triggers, or format"),
        ({"response_format": "json"}, "response_format", "must be an object"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of json, regex"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "not json and regex"),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties", "additionalProperties: false",
        ),
        ({"structural_tag": "{"}, "structural_tag", "not valid JSON"),
        ({"structural_tag": "[]"}, "structural_tag", "must hold a JSON object"),
        ({"structured_outputs": {"structural_tag": "1"}}, "structured_outputs.structural_tag", "must hold a JSON object"),
        ({"bad_words": ["a"] * (MAX_BAD_WORDS + 1)}, "bad_words", "at most 128"),
        ({"bad_words": [""]}, "bad_words", "empty string"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids", "not negative"),
        ({"bad_words": ["a"], "guided_regex": "a"}, "bad_words", "guided_regex and bad_words"),
    ],
)  # fmt: skip
def test_refusals(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)) as refusal:
        read(**fields)
    assert refusal.value.param == param


def test_any_two_at_once_are_refused_by_name() -> None:
    values: dict[str, Any] = {
        "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}, "guided_json": {},
        "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": "start: /a/", "guided_json_object": True,
        "json_schema": {}, "regex": "a", "ebnf": "start: /a/", "grammar": "start: /a/", "structural_tag": TAG,
        "bad_words": ["a"], "allowed_token_ids": [1],
    }  # fmt: skip
    assert set(values) == set(StructuredFields.__struct_fields__)
    for name, value in values.items():
        assert read(**{name: value}) is not None
        other = "regex" if name != "regex" else "ebnf"
        with pytest.raises(InvalidRequest, match="both say") as refusal:
            read(**{name: value, other: values[other]})
        assert name in refusal.value.message and other in refusal.value.message


# -- what becomes a grammar of ours


def accepts(output: StructuredOutput | None, text: str) -> bool:
    """With bytes for tokens."""
    assert output is not None and output.grammar is not None
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, output.grammar)
    assert not matcher.get_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("word", ["cat", "a b", "[x]", "\\", "/", "ខ្មែរ", "a\nb", "1.5", "😀", '"'])
def test_bad_words_cannot_be_written(word: str) -> None:
    output = read(bad_words=[word, "dog"])
    assert accepts(output, "") and accepts(output, "the\nfine text, ក") and accepts(output, word[:-1] + "_")
    assert not accepts(output, f"the {word}.") and not accepts(output, word) and not accepts(output, "my dog")


def test_allowed_tokens_alone_can_be_written() -> None:
    output = read(allowed_token_ids=[100, 98, 97, 97, 120])
    assert output is not None and output.grammar == "start: <[97-98,100,120]>+"
    assert accepts(output, "abba dx".replace(" ", "")) and not accepts(output, "abc") and not accepts(output, "")
