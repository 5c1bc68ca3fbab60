"""Structural tags, both forms: free text stays free, what is inside of a tag is bound."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.checkpoints import TURN_START
from tests.fakes.grammars import accepts, allowed, constraint_of, text
from tonle.engine.grammar.grammar_text import grammar_text
from tonle.engine.request import StructuredOutput
from tonle.errors import InvalidRequest

NUMBER = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
OLD = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<fn=add>", "schema": NUMBER, "end": "</fn>"},
        {"begin": "<fn=ask>", "schema": {"enum": ["x", "y"]}, "end": "</fn>"},
    ],
    "triggers": ["<fn="],
}
BOOL = {"type": "json_schema", "json_schema": {"type": "boolean"}}
DIGITS = {"type": "regex", "pattern": "^[0-9]{2}$"}
TAGS = [{"begin": "<a>", "content": DIGITS, "end": "</a>"}, {"begin": "<ab>", "content": BOOL, "end": "</ab>"}]


def new(**format_: Any) -> StructuredOutput:
    return StructuredOutput(structural_tag={"type": "structural_tag", "format": format_})


CASES: list[tuple[StructuredOutput, list[str], list[str]]] = [
    (
        StructuredOutput(structural_tag=OLD),
        ["any text", "", 'so <fn=add>{"a": 5}</fn> and <fn=ask>"y"</fn>', "a < b <f"],
        ["<fn=", '<fn=no>{"a": 5}</fn>', '<fn=add>{"a": "x"}</fn>', '<fn=add>{"a": 5}'],
    ),
    (
        new(type="triggered_tags", triggers=["<a"], tags=TAGS),
        ["x <a>12</a> y <ab>true</ab>", "none"],
        ["<a>1</a>", "<ax>"],
    ),
    (new(type="triggered_tags", triggers=["<a"], tags=TAGS, at_least_one=True), ["x <a>12</a> y"], ["none"]),
    (
        new(type="triggered_tags", triggers=["<a"], tags=TAGS, at_least_one=True, stop_after_first=True),
        ["x <a>12</a>"],
        ["none", "<a>12</a> y"],
    ),
    (
        new(type="tags_with_separator", tags=TAGS, separator=", "),
        ["", "<a>12</a>", "<a>12</a>, <ab>true</ab>"],
        ["<a>12</a>;", "x"],
    ),
    (
        new(type="tags_with_separator", tags=TAGS, separator=", ", at_least_one=True, stop_after_first=True),
        ["<a>12</a>"],
        ["", "<a>12</a>, <a>12</a>"],
    ),
    (
        new(
            type="sequence",
            elements=[
                {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
                {"type": "const_string", "value": " so "},
                {"type": "or", "elements": [BOOL, DIGITS]},
            ],
        ),
        ["<t>why < not\n</t> so true", "<t></t> so 12"],
        ["<t>x so true", "<t>x</t> so no", "so true"],
    ),
    (new(type="tag", begin="", content=BOOL, end=""), ["true"], ["tru"]),
    (
        new(type="sequence", elements=[{"type": "const_string", "value": "A: "}, {"type": "any_text"}]),
        ["A: ", "A: b\nc"],
        ["B"],
    ),
]


@pytest.mark.parametrize(("structured", "good", "bad"), CASES)
def test_tags_bind_what_is_in_them(structured: StructuredOutput, good: list[str], bad: list[str]) -> None:
    assert [answer for answer in good if not accepts(structured, answer)] == []
    assert [answer for answer in bad if accepts(structured, answer)] == []


def test_a_special_token_in_a_tag_is_the_token() -> None:
    """Its characters would be other tokens, which the model never writes there."""
    until = new(type="tag", begin="<|im_start|>go ", content={"type": "any_text"}, end="<|im_start|>!")
    constraint = constraint_of(until)
    assert constraint.forced(1) == [TURN_START]
    for token in text().encode("go where? ", add_special_tokens=False):
        constraint.push(token)
    assert constraint.error is None and TURN_START in (allowed(constraint) or ())
    constraint.push(TURN_START)
    assert text().decode(constraint.forced(9)) == "!" and constraint.is_complete


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ({}, "`format`, or `structures` and `triggers`"),
        (
            {"format": {"type": "qwen_xml_parameter"}},
            "format of structural_tag has type 'qwen_xml_parameter', which is not supported",
        ),
        ({"format": 5}, "format must be an object with a `type`"),
        ({"structures": []}, "a list `structures` that is not empty"),
        ({"structures": [1], "triggers": ["<"]}, "structures[0] of structural_tag must be an object"),
        ({"structures": [{"begin": "<a>", "end": ""}]}, "a list `triggers`"),
        ({"structures": [{"begin": "<a>", "end": ""}], "triggers": ["<b"]}, "begins with '<a>', and no trigger does"),
        ({"structures": [{"begin": "<a>", "end": "", "schema": {"not": {}}}], "triggers": ["<"]}, "'not' at #"),
        (
            {"format": {"type": "sequence", "elements": [{"type": "any_text"}, BOOL]}},
            "elements[0] of structural_tag is any_text, which must",
        ),
        ({"format": {"type": "tag", "begin": "a", "content": BOOL, "end": ["b", "c"]}}, "one string as its `end`"),
        ({"format": {"type": "const_string"}}, "a string `value`"),
        (
            {"format": {"type": "triggered_tags", "triggers": ["<"], "tags": TAGS, "excludes": ["x"]}},
            "`excludes`, which is not",
        ),
    ],
)
def test_what_cannot_be_mapped_is_refused_by_name(tag: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammar_text(StructuredOutput(structural_tag=tag))
    assert words in caught.value.message
