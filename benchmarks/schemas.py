"""JSON schemas of our own, for tests and measurements of structured output: any number of them, the same for the same seed.

Does: nested and recursive objects, enums, constants, patterns, formats, unions, bounds, tuples, maps, shared definitions, Khmer
keys and values. Every string, array and number has a bound, so that an answer can end within its tokens. Does not: schemas
that are refused; tests/unit/engine/grammar has those.
"""

from __future__ import annotations

import datetime
import functools
import ipaddress
import json
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

Schema = dict[str, Any]

TOPICS = [
    "a person from Phnom Penh",
    "a book",
    "a recipe for fish soup",
    "a boat on the Tonle Sap",
    "a weather report",
    "an order in a shop",
    "a film",
    "a village",
    "a bus timetable",
    "a library card",
]
WORDS = [
    "name",
    "title",
    "city",
    "kind",
    "price",
    "count",
    "note",
    "owner",
    "code",
    "place",
    "size",
    "state",
    "first name",
    "e-mail",
    "is_open",
    "Ärger",
    "naïve",
    "x/y",
    'say "hi"',
    "tab\there",
]
KHMER = ["ឈ្មោះ", "អាយុ", "ទីក្រុង", "តម្លៃ", "ចំនួន", "ភាសា", "ថ្ងៃខែ", "ខេត្ត", "ផ្លូវ", "កំណត់ចំណាំ"]
KHMER_VALUES = ["ភ្នំពេញ", "សៀមរាប", "បាត់ដំបង", "កំពត", "ត្រី", "បាយ", "ទឹក", "ផ្ទះ"]
VALUES = [
    "red",
    "green",
    "blue",
    "small",
    "large",
    "open",
    "closed",
    "left",
    "right",
    "new",
    "old",
    'a "b"',
    "x\\y",
    "é",
    "☂",
]
PATTERNS = [
    r"^[A-Z]{2}-[0-9]{4}$",
    r"^\+855 [1-9][0-9] [0-9]{3} [0-9]{3}$",
    r"^#[0-9a-f]{6}$",
    r"^(foo|bar|baz){1,3}$",
    r"^[a-z]+(-[a-z]+){0,2}$",
    r"^v\d{1,2}\.\d{1,2}$",
    "^[ក-អ]{1,4}$",
    r"^[^a-z]{1,6}$",
    r"^(?:yes|no) / (?:yes|no)$",
    r"^\d{1,3}(,\d{3}){0,2}$",
]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "ipv6"]


@dataclass(frozen=True, slots=True)
class Case:
    index: int
    kind: str
    schema: Schema
    topic: str

    @property
    def prompt(self) -> str:
        return f"Describe {self.topic} as JSON. Be brief."

    def problem(self, text: str) -> str | None:
        """What is wrong with an answer; None: it parses, and is what the schema says."""
        try:
            value = json.loads(text)
        except ValueError as error:
            return f"does not parse: {error}"
        found = next(validator(self.schema).iter_errors(value), None)
        return None if found is None else f"is not valid: {found.message[:200]}"


def make_cases(count: int = 200, seed: int = 17) -> list[Case]:
    rng = random.Random(seed)
    kinds = list(_KINDS.items())
    cases = []
    for index in range(count):
        kind, make = kinds[index % len(kinds)]
        cases.append(Case(index, kind, make(rng), rng.choice(TOPICS)))
    return cases


def validator(schema: Schema) -> Any:
    import jsonschema  # not where only speed is measured

    return jsonschema.Draft202012Validator(schema, format_checker=_format_checker())


@functools.cache
def _format_checker() -> Any:
    """Formats as Python reads them."""
    import jsonschema

    checker = jsonschema.FormatChecker(formats=[])
    readers: dict[str, Callable[[str], object]] = {
        "date": datetime.date.fromisoformat, "time": datetime.time.fromisoformat, "date-time": datetime.datetime.fromisoformat,
        "uuid": uuid.UUID, "ipv4": ipaddress.IPv4Address, "ipv6": ipaddress.IPv6Address,
    }  # fmt: skip
    for name, read in readers.items():
        checker.checks(name, raises=ValueError)(partial(_is_read, read))
    return checker


def _is_read(read: Callable[[str], object], value: object) -> bool:
    """Raises `ValueError`."""
    if isinstance(value, str):
        read(value)
    return True


# -- leaves


def _string(rng: random.Random) -> Schema:
    return {"type": "string", "minLength": rng.choice([0, 1, 2]), "maxLength": rng.choice([8, 12, 24])}


def _integer(rng: random.Random) -> Schema:
    low = rng.choice([-1000, -7, 0, 1, 18])
    high = low + rng.choice([1, 5, 99, 12345])
    if rng.random() < 0.3:
        return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high + 2}
    if rng.random() < 0.3:
        return {"type": "integer", "minimum": low, "maximum": high + 20, "multipleOf": rng.choice([2, 5, 7])}
    return {"type": "integer", "minimum": low, "maximum": high}


def _number(rng: random.Random) -> Schema:
    low = rng.choice([-2, 0, 0.5])
    return {
        "type": "number",
        "minimum": low,
        "maximum": low + rng.choice([1, 10, 99.5]),
        "multipleOf": rng.choice([0.25, 0.5]),
    }


def _enum(rng: random.Random) -> Schema:
    values: list[Any] = rng.sample([*VALUES, *KHMER_VALUES], rng.randint(2, 6))
    return {"enum": values + rng.choice([[], [None], [1, 2.5], [True]])}


def _const(rng: random.Random) -> Schema:
    return {"const": rng.choice([*VALUES, 7, None, True, ["a", 1], {"k": "v"}])}


def _pattern(rng: random.Random) -> Schema:
    return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 40}


def _format(rng: random.Random) -> Schema:
    return {"type": "string", "format": rng.choice(FORMATS)}


def _nullable(rng: random.Random) -> Schema:
    return rng.choice(
        [
            {"type": ["string", "null"], "maxLength": 10},
            {"type": ["boolean", "null"]},
            {"anyOf": [_integer(rng), {"type": "null"}]},
        ]
    )


_LEAVES: list[Callable[[random.Random], Schema]] = [
    _string,
    _integer,
    _number,
    _enum,
    _const,
    _pattern,
    _format,
    _nullable,
    lambda _: {"type": "boolean"},
]


def _leaf(rng: random.Random) -> Schema:
    return rng.choice(_LEAVES)(rng)


# -- whole schemas


def _object(
    rng: random.Random, part: Callable[[random.Random], Schema] = _leaf, names: list[str] | None = None
) -> Schema:
    keys = rng.sample(names or WORDS, rng.randint(2, 4))
    required = [key for key in keys if rng.random() < 0.7]
    made: Schema = {"type": "object", "properties": {key: part(rng) for key in keys}, "required": required}
    if rng.random() < 0.5:
        made["additionalProperties"] = False
    return made


def _array(rng: random.Random, part: Callable[[random.Random], Schema] = _leaf) -> Schema:
    low = rng.choice([0, 1, 2])
    return {"type": "array", "items": part(rng), "minItems": low, "maxItems": low + rng.choice([0, 1, 2])}


def _nested(rng: random.Random) -> Schema:
    return _object(rng, lambda inner: rng.choice([_leaf, _object, _array])(inner))


def _deep(rng: random.Random) -> Schema:
    schema = _leaf(rng)
    for _ in range(rng.randint(3, 5)):
        schema = {"type": "object", "properties": {rng.choice(WORDS): schema}, "additionalProperties": False}
        schema["required"] = list(schema["properties"])
    return schema


def _union(rng: random.Random) -> Schema:
    return {
        "type": "object",
        "properties": {"value": {"anyOf": [_leaf(rng), _object(rng), _array(rng)]}},
        "required": ["value"],
    }


def _one_of(rng: random.Random) -> Schema:
    """Told apart by a constant, as programs generate it from tagged unions."""
    branches = []
    for kind in rng.sample(VALUES[:8], 3):
        branch = _object(rng)
        properties = {"type": {"const": kind}, **branch["properties"]}
        branches.append({"type": "object", "properties": properties, "required": ["type", *branch["required"]]})
    return {"oneOf": branches}


def _tuple(rng: random.Random) -> Schema:
    parts = [_leaf(rng) for _ in range(rng.randint(2, 4))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _list_of_nodes(rng: random.Random) -> Schema:
    value = rng.choice([_enum, _integer, _nullable])(rng)  # short: such an answer may take many turns to end
    node = {
        "type": "object",
        "properties": {"value": value, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def _tree(rng: random.Random) -> Schema:
    properties = {"label": _enum(rng), "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}}
    return {"type": "object", "properties": properties, "required": ["label"], "additionalProperties": False}


def _khmer(rng: random.Random) -> Schema:
    return _object(rng, lambda inner: rng.choice([_leaf, _enum, _string])(inner), KHMER)


def _shared(rng: random.Random) -> Schema:
    definitions = {"item": _object(rng), "tag": _enum(rng)}
    part = {"type": "array", "items": {"$ref": "#/$defs/item"}, "minItems": 1, "maxItems": 2}
    return {
        "type": "object",
        "properties": {"tag": {"$ref": "#/$defs/tag"}, "items": part, "other": {"$ref": "#/$defs/tag"}},
        "required": ["tag", "items"],
        "$defs": definitions,
    }


def _all_of(rng: random.Random) -> Schema:
    first, second = rng.sample(WORDS, 2)
    parts = [{"type": "object", "properties": {name: _leaf(rng)}, "required": [name]} for name in (first, second)]
    return {"allOf": [*parts, {"maxProperties": 2, "minProperties": 2}]}


def _map(rng: random.Random) -> Schema:
    if rng.random() < 0.5:
        return {
            "type": "object",
            "patternProperties": {"^[a-z]{1,6}$": _leaf(rng)},
            "additionalProperties": False,
            "maxProperties": 3,
        }
    names = "^[A-Za-zក-អ ]{1,12}$"  # keys have a bound, too
    return {
        "type": "object",
        "patternProperties": {names: _integer(rng)},
        "additionalProperties": False,
        "maxProperties": 1,
    }


def _top_leaf(rng: random.Random) -> Schema:
    return rng.choice([_enum, _string, _integer, _pattern, _format])(rng)


_KINDS: dict[str, Callable[[random.Random], Schema]] = {
    "object": _object,
    "nested": _nested,
    "deep": _deep,
    "array": lambda rng: _array(rng, _object),
    "union": _union,
    "oneOf": _one_of,
    "tuple": _tuple,
    "linked list": _list_of_nodes,
    "tree": _tree,
    "khmer": _khmer,
    "shared": _shared,
    "allOf": _all_of,
    "map": _map,
    "patterns": lambda rng: _object(rng, _pattern),
    "formats": lambda rng: _object(rng, _format),
    "numbers": lambda rng: _object(rng, lambda inner: rng.choice([_integer, _number])(inner)),
    "enums": lambda rng: _object(rng, _enum),
    "nullable": lambda rng: _object(rng, _nullable),
    "constants": lambda rng: _object(rng, _const),
    "leaf": _top_leaf,
}


def without_lengths(schema: Any) -> Any:
    """The schema with texts of any length and kind, as most callers write them."""
    if isinstance(schema, list):
        return [without_lengths(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    is_text = schema.get("type") == "string" and "enum" not in schema and "const" not in schema
    dropped = ("minLength", "maxLength", "pattern", "format") if is_text else ()
    return {name: without_lengths(value) for name, value in schema.items() if name not in dropped}
