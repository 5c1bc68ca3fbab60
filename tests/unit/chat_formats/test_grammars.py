"""Grammars take what a format's models write and nothing else, and what they take is read back as calls that are valid."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from tests.fakes.byte_vocabulary import ByteVocabulary
from tests.unit.chat_formats.examples import JSON_VARIANTS, STRICT, TOOLS, VARIANTS, WEATHER, joined, read, variant
from tonle.chat_formats import Tool, ToolChoice, find_format
from tonle.chat_formats.grammar_text import MAX_CALLS
from tonle.errors import InvalidRequest

_BYTES = ByteVocabulary()
_GOOD, _BAD = ("get_weather", {"city": "ភ្នំពេញ", "days": 3}), ("get_weather", {"city": "X", "days": 99})
_OTHERS = ("Hello.", "{", "", "null", '{"name": "drop_table", "arguments": {}}')

# One answer that is bound, in each format whose arguments are not JSON elsewhere.
_BOUND = {
    "qwen3_coder": '<tool_call>\n<function=get_weather>\n{"city": "X"}\n</function>\n</tool_call>',
    "pythonic": '[get_weather({"city": "X"})]',
    "functiongemma": '<start_function_call>call:get_weather{"city": "X"}<end_function_call>',
}
# Schemas with what is hard: references, recursion, unions, patterns, keys of Khmer.
_TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}},
    "required": ["root"],
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "ឈ្មោះ": {"type": "string", "maxLength": 5},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["ឈ្មោះ", "next"],
        }
    },
}  # fmt: skip
_UNION = {
    "anyOf": [
        {"properties": {"id": {"type": "string", "pattern": "^[a-z]{2}-[0-9]{1,3}$"}}, "required": ["id"]},
        {"properties": {"at": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}}, "required": ["at"]},
    ]
}  # fmt: skip
_ALL_OF = {
    "allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"properties": {"b": {"type": "boolean"}}}]
}
_HARD = [
    Tool("tree", parameters=_TREE),
    Tool("union", parameters=_UNION),
    Tool("both", parameters=_ALL_OF),
    Tool("any"),
    Tool("w", parameters=WEATHER),
]


def _must(
    name: str, tools: list[Tool] = TOOLS, choice: ToolChoice | None = None, special: ByteVocabulary = _BYTES
) -> str:
    grammar = variant(name, special.special_tokens).grammar(tools, choice or ToolChoice(must_call=True))
    assert grammar is not None
    return grammar


def _check(tools: list[Tool], parts: list[tuple[str, Any]]) -> None:
    schemas = {tool.name: tool.parameters for tool in tools}
    for name, arguments in (call for kind, call in parts if kind == "call"):
        jsonschema.Draft202012Validator({"type": "object", **schemas[name]}).validate(json.loads(arguments))


@pytest.mark.parametrize("name", VARIANTS)
class TestCallsAlone:
    def test_only_calls_are_taken(self, name: str) -> None:
        grammar = _must(name)
        for other in _OTHERS:
            assert not _BYTES.accepts(grammar, other)
        text = _BOUND.get(name) or variant(name).write_calls([_GOOD])
        assert _BYTES.accepts(grammar, text)
        assert not _BYTES.accepts(grammar, f"Well, {text}")
        assert not _BYTES.accepts(grammar, f"{text} Well.")
        assert not _BYTES.accepts(grammar, text.replace("get_weather", "drop_table"))

    def test_a_named_tool_is_the_one_and_is_called_once(self, name: str) -> None:
        grammar = _must(name, choice=ToolChoice(name="now"))
        assert not _BYTES.accepts(grammar, _BOUND.get(name) or variant(name).write_calls([_GOOD]))
        for seed in range(3):
            text = _BYTES.walk(grammar, random.Random(seed))
            if text is not None:
                (((_, (called, _)),)) = joined(read(variant(name), text))
                assert called == "now"

    def test_what_is_taken_is_read_back_as_valid_calls(self, name: str) -> None:
        grammar = _must(name, _HARD)
        num_ended = 0
        for seed in range(8):
            text = _BYTES.walk(grammar, random.Random(seed))
            if text is None:
                continue
            num_ended += 1
            parts = joined(read(variant(name), text, _HARD))
            assert parts
            assert {kind for kind, _ in parts} <= {"call"} or name == "gpt_oss", text
            assert parts[-1][0] == "call", text
            assert len(parts) <= MAX_CALLS or name == "gpt_oss"
            _check(_HARD, parts)
        assert num_ended >= 4, "too few answers ended for this to show much"


@pytest.mark.parametrize("name", JSON_VARIANTS)
class TestAsModelsWrite:
    def test_calls_are_taken_as_they_are_written(self, name: str) -> None:
        chat_format, grammar = variant(name), _must(name)
        assert _BYTES.accepts(grammar, chat_format.write_calls([_GOOD]))
        assert _BYTES.accepts(grammar, chat_format.write_calls([("now", {})]))
        assert _BYTES.accepts(grammar, chat_format.write_calls([("now", {"any": [1, {"thing": None}]})]))
        assert not _BYTES.accepts(grammar, chat_format.write_calls([_BAD]))
        assert not _BYTES.accepts(grammar, chat_format.write_calls([("get_weather", {})]))

    def test_parallel_calls_are_taken_if_they_are_wanted(self, name: str) -> None:
        two, many = (variant(name).write_calls([_GOOD] * num_calls) for num_calls in (2, MAX_CALLS + 1))
        if name in ("llama3", "gpt_oss"):  # their models make one call at a time
            assert not _BYTES.accepts(_must(name), two)
            return
        assert _BYTES.accepts(_must(name), two)
        assert not _BYTES.accepts(_must(name), many)
        assert not _BYTES.accepts(_must(name, choice=ToolChoice(must_call=True, parallel=False)), two)


@pytest.mark.parametrize("name", VARIANTS)
class TestCallsInText:
    def _grammar(self, name: str, choice: ToolChoice | None = None) -> str:
        return _must(name, STRICT, choice or ToolChoice())

    def test_any_text_is_taken(self, name: str) -> None:
        before = "<|channel|>final<|message|>" if name == "gpt_oss" else ""
        for text in ("", "Hello.", 'a < b, {"name": "Anna"}, [1] ភ្នំ\n', "<b>"):
            assert _BYTES.accepts(self._grammar(name), before + text)

    def test_calls_of_strict_tools_are_bound(self, name: str) -> None:
        good = _BOUND.get(name) or variant(name).write_calls([_GOOD])
        grammar, before = self._grammar(name), "" if name == "gpt_oss" else "Let me look. "
        assert _BYTES.accepts(grammar, before + good)
        assert not _BYTES.accepts(grammar, before + variant(name).write_calls([_BAD]))
        assert not _BYTES.accepts(grammar, before + good.replace('"city"', '"town"'))

    def test_calls_of_other_tools_are_not(self, name: str) -> None:
        text = variant(name).write_calls([("now", {"any": [1, 2]})])
        if name == "functiongemma":
            text = '<start_function_call>call:now{"any": [1, 2]}<end_function_call>'
        assert _BYTES.accepts(self._grammar(name), text)

    def test_one_call_at_most_if_no_more_are_wanted(self, name: str) -> None:
        good = _BOUND.get(name) or variant(name).write_calls([_GOOD])
        grammar = self._grammar(name, ToolChoice(parallel=False))
        assert _BYTES.accepts(grammar, good)
        assert not _BYTES.accepts(grammar, f"{good}\n{good}")

    def test_every_call_that_is_read_is_valid(self, name: str) -> None:
        if name == "gpt_oss":
            begin = "<|channel|>commentary to=functions.get_weather "
        else:
            written = _BOUND.get(name) or variant(name).write_calls([_GOOD])
            begin = f"So: {written[: written.index('get_weather') + len('get_weather') + 1]}"
        for seed in range(6):
            text = _BYTES.walk(self._grammar(name), random.Random(seed), begin=begin, most=800)
            if text is not None:
                parts = joined(read(variant(name), text, STRICT))
                assert "get_weather" in [part[1][0] for part in parts if part[0] == "call"]
                _check(STRICT, [part for part in parts if part[0] != "call" or part[1][0] == "get_weather"])

    def test_without_strict_tools_nothing_is_bound(self, name: str) -> None:
        assert variant(name).grammar(TOOLS, ToolChoice()) is None


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "mistral-new", "phi4", "functiongemma", "gpt_oss"])
def test_tags_that_are_special_tokens_are_asked_for_as_such(name: str) -> None:
    special = ByteVocabulary([*variant(name).tags, "<|other|>"])
    chat_format = variant(name, special.special_tokens)
    assert chat_format.reads_special_tokens
    text = _BOUND.get(name) or chat_format.write_calls([_GOOD])
    assert special.accepts(_must(name, STRICT, ToolChoice(), special), text)
    assert special.accepts(_must(name, special=special), text)
    assert not special.accepts(_must(name, special=special), text.replace("get_weather", "drop_table"))
    walked = special.walk(_must(name, special=special), random.Random(1))
    if walked is not None:
        parts = joined(read(chat_format, walked, thinking=chat_format.thinking))
        assert parts[-1][0] == "call"
        _check(TOOLS, parts)


def test_special_tokens_of_others_do_not_matter() -> None:
    assert not variant("hermes", {"<|im_end|>": 7}).reads_special_tokens


def test_a_name_that_is_no_tool() -> None:
    with pytest.raises(
        InvalidRequest, match=r"tool_choice names 'soon', which is not among the tools \(get_weather, now\)"
    ):
        find_format(None).grammar(TOOLS, ToolChoice(name="soon"))


def test_objects_hold_what_their_schema_names() -> None:
    """A model that may write any further key often does not come to an end."""
    grammar = _must("json", [Tool("f", parameters={**WEATHER, "required": []})])
    call = '{"name": "f", "arguments": %s}'
    assert _BYTES.accepts(grammar, call % "{}")
    assert not _BYTES.accepts(grammar, call % '{"town": "X"}')
    for more in ({"required": [], "additionalProperties": True}, {"required": ["town"]}):
        allowed = _must("json", [Tool("f", parameters={**WEATHER, **more})])
        assert _BYTES.accepts(allowed, call % '{"town": "X"}')


def test_a_schema_that_cannot_be_bound_is_refused_by_the_grammar() -> None:
    grammar = _must("json", [Tool("f", parameters={"properties": {"a": {"type": "array", "uniqueItems": True}}})])
    assert "uniqueItems" in LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar))
