"""What the text of an answer must be, from the fields by which servers let a caller say it.

Does: find the one that is set, in the words of its server, and refuse two at once. Does not: read schemas or grammars; the
engine does, and refuses those it cannot hold an answer to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from tonle.engine.request import StructuredOutput
from tonle.errors import InvalidRequest
from tonle.protocol.bounded_json import decode_json
from tonle.protocol.openai import SamplingFields
from tonle.protocol.structured_fields import ResponseFormat, StructuredFields, StructuredOutputs

MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 200
MAX_ALLOWED_TOKENS = 65_536
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")  # of `StructuredOutputs`


@dataclass(frozen=True, slots=True)
class Structure:
    """What an answer must be, and the field that said so."""

    output: StructuredOutput
    param: str


def read_structured(request: SamplingFields) -> Structure | None:
    """None: any text. Raises `InvalidRequest`."""
    found: list[Structure] = []
    for name in StructuredFields.__struct_fields__:
        value = getattr(request, name)
        if value is not None and (output := _READERS[name](value, name)) is not None:
            found.append(Structure(output, name))
    if len(found) > 1:
        names = " and ".join(each.param for each in found)
        raise InvalidRequest(f"{names} both say what the answer must be: send one of them", param=found[1].param)
    return found[0] if found else None


def _response_format(value: ResponseFormat, name: str) -> StructuredOutput | None:
    match value.type:
        case "text":
            return None
        case "json_object":
            return StructuredOutput(json_object=True)
        case "json_schema":
            if value.json_schema is None or value.json_schema.schema is None:
                path = "response_format.json_schema" + ("" if value.json_schema is None else ".schema")
                raise InvalidRequest(f"{path} is missing", param=path)
            return StructuredOutput(json=value.json_schema.schema)
    if value.format is None and value.structures is None:
        raise InvalidRequest(
            "response_format of type structural_tag needs structures and triggers, or format", param="response_format"
        )
    given = {"type": value.type, "format": value.format, "structures": value.structures, "triggers": value.triggers}
    return StructuredOutput(structural_tag={key: item for key, item in given.items() if item is not None})


def _structured_outputs(value: StructuredOutputs, name: str) -> StructuredOutput | None:
    given = [kind for kind in _KINDS if getattr(value, kind) is not None]
    if value.json_object is False:
        given.remove("json_object")
    if value.disable_additional_properties:
        path = "structured_outputs.disable_additional_properties"
        raise InvalidRequest(f"{path} cannot be served: put additionalProperties: false into the schema", param=path)
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise InvalidRequest(
            f"structured_outputs takes exactly one of {', '.join(_KINDS)}, not {found}", param="structured_outputs"
        )
    return _READERS_INSIDE[given[0]](getattr(value, given[0]), f"structured_outputs.{given[0]}")


def _json(value: dict[str, Any] | bool | str, name: str) -> StructuredOutput:
    return StructuredOutput(json=value)


def _regex(value: str, name: str) -> StructuredOutput:
    return StructuredOutput(regex=value)


def _choice(value: list[str], name: str) -> StructuredOutput:
    if not value:
        raise InvalidRequest(f"{name} is empty; give at least one text", param=name)
    return StructuredOutput(choice=value)


def _grammar(value: str, name: str) -> StructuredOutput:
    return StructuredOutput(grammar=value)


def _json_object(value: bool, name: str) -> StructuredOutput | None:
    return StructuredOutput(json_object=True) if value else None


def _structural_tag(value: dict[str, Any] | str, name: str) -> StructuredOutput:
    if isinstance(value, str):
        try:
            value = decode_json(value.encode(), name)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"{name} is not valid JSON: {error}", param=name) from None
        if not isinstance(value, dict):
            raise InvalidRequest(f"{name} must hold a JSON object", param=name)
    return StructuredOutput(structural_tag=value)


def _bad_words(words: list[str], name: str) -> StructuredOutput | None:
    if len(words) > MAX_BAD_WORDS or any(len(word) > MAX_BAD_WORD_CHARS for word in words):
        raise InvalidRequest(
            f"{name} takes at most {MAX_BAD_WORDS} texts of at most {MAX_BAD_WORD_CHARS} characters", param=name
        )
    if "" in words:
        raise InvalidRequest(f"{name} must not contain an empty string", param=name)
    if not words:
        return None
    any_word = "|".join(_regex_text(word) for word in words)
    return StructuredOutput(grammar=f"start: TEXT\nTEXT: /(?s:.*)/ & ~/(?s:.*)({any_word})(?s:.*)/")


def _regex_text(word: str) -> str:
    """`word` inside a regular expression of a Lark grammar; each character that could mean something by its number."""
    return "".join(letter if letter.isalnum() else f"\\x{{{ord(letter):x}}}" for letter in word)


def _allowed_token_ids(tokens: list[int], name: str) -> StructuredOutput | None:
    if len(tokens) > MAX_ALLOWED_TOKENS:
        raise InvalidRequest(f"{name} takes at most {MAX_ALLOWED_TOKENS} tokens, not {len(tokens)}", param=name)
    if any(token < 0 for token in tokens):
        raise InvalidRequest(f"{name} must hold token ids, which are not negative", param=name)
    return StructuredOutput(grammar=f"start: <[{_ranges(tokens)}]>+") if tokens else None


def _ranges(tokens: list[int]) -> str:
    """`3,7-9`, as a grammar names tokens."""
    runs: list[list[int]] = []  # first and last of each
    for token in sorted(set(tokens)):
        if runs and token == runs[-1][1] + 1:
            runs[-1][1] = token
        else:
            runs.append([token, token])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


_Reader = Callable[[Any, str], StructuredOutput | None]
_READERS_INSIDE: dict[str, _Reader] = {
    "json": _json, "regex": _regex, "choice": _choice, "grammar": _grammar, "json_object": _json_object,
    "structural_tag": _structural_tag,
}  # fmt: skip
_READERS: dict[str, _Reader] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "guided_json_object": _json_object,
    "json_schema": _json,
    "regex": _regex,
    "ebnf": _grammar,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
    "bad_words": _bad_words,
    "allowed_token_ids": _allowed_token_ids,
}
