"""JSON schemas: what is supported holds to the letter, what is not is refused with its place."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from benchmarks.schemas import Case, make_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.grammars import accepts, constraint_of, say, text, vocabulary
from tonle.engine.grammar.compiler import _compile
from tonle.engine.grammar.grammar_text import grammar_text
from tonle.engine.request import StructuredOutput
from tonle.errors import InvalidRequest

OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            PERSON,
            ['{"name": "a", "age": 3}', '{"name": ""}'],
            ['{"age": 3, "name": "a"}', '{"age": 3}', '{"name": "a", "x": 1}'],
        ),
        (OPEN, ['{"a": 1}'], ['{"a": 1, "b": 2}']),
        ({**OPEN, "additionalProperties": True}, ['{"a": 1}', '{"a": 1, "b": [2]}'], ['{"b": 2}']),
        ({**OPEN, "additionalProperties": {"type": "boolean"}}, ['{"a": 1, "b": true}'], ['{"a": 1, "b": 2}']),
        ({**OPEN, "required": ["a", "b"]}, ['{"a": 1, "b": 2}'], ['{"a": 1}']),
        (
            {"allOf": [OPEN, {"properties": {"b": {"const": 1}}, "required": ["b"]}]},
            ['{"a": 1, "b": 1}'],
            ['{"a": 1}', '{"a": 1, "b": 2}'],
        ),
        (
            {
                "$defs": {
                    "n": {
                        "properties": {"n": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
                        "required": ["n"],
                        "type": "object",
                    }
                },
                "$ref": "#/$defs/n",
            },
            ['{"n": {"n": {"n": null}}}'],
            ['{"n": {"n": 1}}', "{}"],
        ),
        ({"enum": ["a", 1, None, ["x"], "ខ្មែរ"]}, ['"a"', "1", "null", '["x"]', '"ខ្មែរ"'], ["a", "2", '"b"']),
        ({"type": "string", "pattern": "^[a-z]{2}$"}, ['"ab"'], ['"abc"', '"A"']),
        ({"type": "string", "pattern": "b"}, ['"abc"'], ['"ac"']),
        ({"type": "integer", "minimum": 3, "exclusiveMaximum": 12}, ["3", "11"], ["2", "12", "3.5"]),
        ({"type": "number", "multipleOf": 0.5, "maximum": 2, "minimum": 0}, ["0", "1.5"], ["1.3", "3"]),
        (
            {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
            ["[true, false]"],
            ["[]", "[true, true, true]"],
        ),
        (
            {"type": "array", "prefixItems": [{"const": 1}, {"const": "x"}], "items": False, "minItems": 2},
            ['[1, "x"]'],
            ["[1]"],
        ),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["1", '"a"'], ["true"]),
        ({"type": ["string", "null"]}, ["null", '"x"'], ["1"]),
        (
            {"type": "string", "format": "date"},
            ['"2024-02-29"', '"0001-01-31"'],
            ['"2023-02-29"', '"1900-02-29"', '"0000-01-01"', '"2024-13-01"'],
        ),
        (
            {"type": "string", "format": "date-time"},
            ['"2024-05-01T23:59:59.5+07:00"'],
            ['"2024-05-01t10:00:00z"', '"2024-05-01T23:59:60Z"'],
        ),
        ({"type": "string", "format": "uuid"}, ['"123e4567-e89b-12d3-a456-426614174000"'], ['"x"']),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, ["[1, 1]"], ["1"]),
        (
            {
                "properties": {"not": {"const": 1}, "if": {"type": "integer", "deprecated": True}},
                "type": "object",
                "required": ["not"],
            },
            ['{"not": 1}'],
            ["{}"],
        ),
        (
            {"type": "integer", "format": "int32", "x-guidance": {"whitespace_flexible": True, "lenient": True}},
            ["5"],
            ["x"],
        ),
        ({"definitions": {"a": {"const": 1}}, "$ref": "#/definitions/a"}, ["1"], ["2"]),
    ],
)
def test_a_schema_is_enforced(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    structured = StructuredOutput(json=schema)
    assert [answer for answer in good if not accepts(structured, answer)] == []
    assert [answer for answer in bad if accepts(structured, answer)] == []


def nested(levels: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (
            {"properties": {"a": {"items": {"not": {}}}}},
            "'not' at #/properties/a/items, which is not supported: describe",
        ),
        ({"if": {}, "then": {}}, "'if' at #"),
        ({"$defs": {"x": {"uniqueItems": True}}}, "'uniqueItems' at #/$defs/x"),
        ({"anyOf": [{}, {"dependentRequired": {}}]}, "'dependentRequired' at #/anyOf/1"),
        (
            {"properties": {"a": {"$ref": "https://example.org/a.json"}}},
            "$ref to 'https://example.org/a.json' at #/properties/a",
        ),
        ({"$ref": "other.json#/x"}, "nothing is fetched"),
        ({"type": "string", "format": "iri"}, "format 'iri' at #, which is not supported; known are date, date-time"),
        ({"items": {"pattern": "(?=x)y"}}, "'(?=' in the pattern at #/items"),
        ({"items": {"pattern": r"(a)\1"}}, r"'\\1' in the pattern"),
        ({"properties": {str(i): {} for i in range(401)}}, "401 properties at #; one object may have at most 400"),
        (nested(10_000), "more than 100 levels"),
        (json.dumps(nested(100)).replace('"integer"', '[{"a":' * 10_000), "more than 100 levels"),
        ({"enum": ["x" * 1_000_000]}, "bytes; at most 262144"),
        (json.dumps({"enum": ["x" * 1_000_000]}), "bytes; at most 262144"),
    ],
)
def test_what_is_not_supported_is_refused_with_its_place(schema: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammar_text(StructuredOutput(json=schema))
    assert words in caught.value.message


KEYWORDS = [
    "type", "format", "pattern", "properties", "required", "items", "anyOf", "allOf", "$ref", "$defs", "enum", "const", "minimum",
    "additionalProperties", "patternProperties", "prefixItems", "uniqueItems", "deprecated", "x-guidance", "maxLength", "$schema",
]  # fmt: skip
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["string", "date", "#", "object", "[a", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYWORDS), ANY_JSON, max_size=4))
def test_nonsense_is_a_callers_mistake_or_compiles(schema: dict[str, Any]) -> None:
    try:
        grammar = grammar_text(StructuredOutput(json=schema))
    except InvalidRequest:
        return
    _compile((b"", grammar), vocabulary())


def test_the_callers_schema_is_left_as_it_was() -> None:
    schema = {**OPEN, "deprecated": True}
    before = json.dumps(schema)
    grammar_text(StructuredOutput(json=schema))
    assert json.dumps(schema) == before


@pytest.mark.parametrize("case", make_cases(60, seed=3), ids=lambda case: f"{case.index} {case.kind}")
def test_whatever_a_schema_lets_through_is_valid(case: Case) -> None:
    """Random tokens, out of those that are allowed: no model is as careless."""
    rng = random.Random(case.index)
    for forcing in (True, False):
        constraint = constraint_of(StructuredOutput(json=case.schema))
        tokens = say(constraint, rng, forcing=forcing)
        if constraint.is_complete or constraint.matcher.is_accepting():  # else a recursion that went on
            assert case.problem(text().decode(tokens)) is None
        else:
            assert case.kind in ("linked list", "tree")
