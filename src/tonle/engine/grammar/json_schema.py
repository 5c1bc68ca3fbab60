"""A JSON schema to a grammar that llguidance reads.

Does: check size and depth, refuse by name and path what llguidance does not support, close objects that say nothing about further
properties, fix how the JSON is written. Does not: compile; what is left to say about a schema, llguidance says when it does.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from tonle.engine.grammar.limits import (
    MAX_MULTIPLE_OF,
    MAX_PROPERTIES,
    check_bytes,
    check_text_depth,
    check_value_depth,
    refuse,
)
from tonle.engine.grammar.schema_patterns import check_patterns

# How the JSON is written: on one line, one space after each comma and colon, no other. Where any white space may stand, a small
# model writes spaces until its tokens run out; and what may not vary need not be sampled: between two values, all is forced.
_WRITING: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,  # an answer that fits two branches is not what oneOf asks for
    "lenient": False,  # nothing is ignored
}

_SEARCH_S = 0.1  # for the part of a schema that is at fault

# Keywords with a schema in them: one, a list of them, or one per name.
_ONE = ("additionalProperties", "additionalItems", "items")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("$defs", "definitions", "properties", "patternProperties")

_UNSUPPORTED = {
    "not": "describe what is allowed instead",
    "if": "use anyOf with one branch per case",
    "then": "use anyOf with one branch per case",
    "else": "use anyOf with one branch per case",
    "contains": "describe all items with items",
    "minContains": "describe all items with items",
    "maxContains": "describe all items with items",
    "uniqueItems": "remove it, and check the answer",
    "propertyNames": "use patternProperties with additionalProperties: false",
    "dependentRequired": "use anyOf with one branch per case",
    "dependentSchemas": "use anyOf with one branch per case",
    "dependencies": "use anyOf with one branch per case",
    "unevaluatedProperties": "use additionalProperties",
    "unevaluatedItems": "use items",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
}
_FORMATS = frozenset({
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown",
})  # fmt: skip
# Dates and times as every program reads them. llguidance's own take in 2023-02-29, the 60th second and a small t, as RFC 3339 has
# it, and many parsers do not.
_YEAR = r"([0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    rf"|{_LEAP_YEAR}-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_NARROWED = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
_LOOKS = re.compile(r"\(\?<?[=!]|\\[1-9]")  # ahead or behind, or at what matched before

_COMPOSED = ("allOf", "anyOf", "oneOf", "$ref")  # beside `properties`, or in allOf: several schemas describe one object


def json_grammar(schema: dict[str, Any] | bool | str) -> str:
    """The grammar of the values that `schema` allows. Raises `InvalidRequest`."""
    checked = _read(schema)
    if checked is False:
        refuse("the schema `false` allows no answer at all")
    described = {} if checked is True else checked
    parts = list(_subschemas(described))
    for path, part in parts:
        _check(path, part)
    check_patterns(described, parts)
    if not any(_is_composed(part) for _, part in parts):
        for _, part in parts:
            _close(part)
    return grammar_of(json_schema={**described, "x-guidance": _WRITING})


def where_it_fails(grammar: str, error_of: Callable[[str], str], error: str) -> str | None:
    """The JSON pointer of the smallest part of a schema that fails with the same error, which llguidance does not tell.
    `grammar`: from `json_grammar`. None: it is no schema, or no part of it says the same alone."""
    schema = msgspec.json.decode(grammar)["grammars"][0].get("json_schema") if grammar.startswith("{") else None
    if not isinstance(schema, dict):
        return None
    shared = {name: schema[name] for name in ("$schema", "$defs", "definitions", "x-guidance") if name in schema}
    smallest_first = sorted(_subschemas(schema), key=lambda item: item[0].count("/"), reverse=True)
    until_s = time.monotonic() + _SEARCH_S
    for path, part in smallest_first:
        if time.monotonic() > until_s:
            return None
        if error_of(grammar_of(json_schema={**part, **shared})) == error:
            return path
    return None


def grammar_of(**form: Any) -> str:
    """One grammar, as llguidance reads it: `json_schema` or `lark_grammar`."""
    try:
        return msgspec.json.encode({"grammars": [form]}).decode()
    except UnicodeEncodeError:
        refuse("the grammar has half of a surrogate pair in it, which is no character")


def embedded_json(schema: dict[str, Any] | bool | str) -> str:
    """`%json …`: the same inside of a Lark grammar."""
    grammar = msgspec.json.decode(json_grammar(schema))
    return "%json " + msgspec.json.encode(grammar["grammars"][0]["json_schema"]).decode()


def _read(schema: Any) -> Any:
    """A copy that is ours, of a schema of tolerable size."""
    if isinstance(schema, str):
        check_bytes("the JSON schema", len(schema.encode(errors="replace")))
        check_text_depth("the JSON schema", schema)
        try:
            schema = msgspec.json.decode(schema)
        except msgspec.DecodeError as error:
            refuse(f"the JSON schema is not valid JSON: {error}")
    if not isinstance(schema, dict | bool):
        refuse(f"a JSON schema is an object, true or false, not {type(schema).__name__}")
    check_value_depth("the JSON schema", schema)
    try:
        encoded = msgspec.json.encode(schema)
    except (TypeError, ValueError) as error:
        refuse(f"the JSON schema cannot be written as JSON: {error}")
    check_bytes("the JSON schema", len(encoded))
    return msgspec.json.decode(encoded)


def _subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object that is a schema, with its JSON pointer. What stands in enum, const, default or examples is none."""
    waiting: list[tuple[str, Any]] = [("#", schema)]
    while waiting:
        path, part = waiting.pop()
        if not isinstance(part, dict):
            continue
        yield path, part
        waiting += [(f"{path}/{name}", part[name]) for name in _ONE if isinstance(part.get(name), dict)]
        for name in _LISTS:
            if isinstance(part.get(name), list):
                waiting += [(f"{path}/{name}/{index}", item) for index, item in enumerate(part[name])]
        for name in _NAMED:
            if isinstance(part.get(name), dict):
                waiting += [(f"{path}/{name}/{key}", item) for key, item in part[name].items()]


def _check(path: str, part: dict[str, Any]) -> None:
    part.pop("deprecated", None)  # an annotation, which llguidance takes for more
    if part.get("uniqueItems") is False:
        del part["uniqueItems"]
    for name, instead in _UNSUPPORTED.items():
        if name in part:
            refuse(f"the JSON schema has {name!r} at {path}, which is not supported: {instead}")
    ref = part.get("$ref")
    if isinstance(ref, str) and not ref.startswith("#"):
        refuse(
            f"the JSON schema has a $ref to {ref[:100]!r} at {path}; nothing is fetched: put what it names under $defs, and "
            "write #/$defs/NAME"
        )
    kind = part.get("format")
    if isinstance(kind, str) and kind not in _FORMATS and _may_be_string(part):
        known = ", ".join(sorted(_FORMATS - {"unknown"}))
        refuse(
            f"the JSON schema has format {kind[:60]!r} at {path}, which is not supported; known are {known}; or use pattern"
        )
    pattern = part.get("pattern")
    if isinstance(pattern, str) and (found := _LOOKS.search(pattern)):
        refuse(
            f"the JSON schema has {found[0]!r} in the pattern at {path}; patterns may neither look ahead or behind "
            "nor refer back: they are matched while the text is written"
        )
    if pattern is None and isinstance(kind, str) and kind in _NARROWED:
        part["pattern"] = _NARROWED[part.pop("format")]
    multiple = part.get("multipleOf")
    if isinstance(multiple, int | float) and multiple > MAX_MULTIPLE_OF:
        refuse(f"the JSON schema has multipleOf {multiple} at {path}; at most {MAX_MULTIPLE_OF} is taken")
    properties = part.get("properties")
    if isinstance(properties, dict) and len(properties) > MAX_PROPERTIES:
        refuse(
            f"the JSON schema has {len(properties)} properties at {path}; one object may have at most {MAX_PROPERTIES}"
        )


def _may_be_string(part: dict[str, Any]) -> bool:
    """Elsewhere a format (int32, double) says nothing about the text."""
    kind = part.get("type", "string")
    return kind == "string" or (isinstance(kind, list) and "string" in kind)


def _is_composed(part: dict[str, Any]) -> bool:
    """Whether several schemas describe one object: closing one of them would forbid what the others ask for."""
    return "allOf" in part or ("properties" in part and any(name in part for name in _COMPOSED))


def _close(part: dict[str, Any]) -> None:
    """No property but those listed, where the schema does not say. Any answer is valid all the same, and it ends: a model that
    may invent properties goes on inventing them."""
    properties = part.get("properties")
    if not isinstance(properties, dict) or not properties:
        return
    if any(name in part for name in ("additionalProperties", "patternProperties", "minProperties")):
        return
    required = part.get("required", [])
    if isinstance(required, list) and all(name in properties for name in required if isinstance(name, str)):
        part["additionalProperties"] = False
