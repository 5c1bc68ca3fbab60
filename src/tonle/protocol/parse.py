"""`parse`: the bytes of a request body to a typed request, and warnings about fields that had no effect.

Does: explain what is wrong in the caller's words (field path, what was expected, what was sent); report every field we do
not act on. Does not: say how much a body may hold (`bounded_json.py`), or check values against the model
(`replica/translate.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from tonle.config.allowed_values import allowed_values
from tonle.errors import InvalidRequest
from tonle.protocol.bounded_json import decode_json
from tonle.protocol.fields import remark
from tonle.protocol.openai import FieldWarning

RequestT = TypeVar("RequestT", bound=msgspec.Struct)

# A body with ten thousand unknown fields, or with a very long name, still gets a short reply.
MAX_WARNINGS = 32
MAX_NAME_CHARS = 100
MAX_FIELDS = 1000  # of the body itself; no API has a tenth of that
MAX_HEADER_CHARS = 256  # of X-Tonle-Warnings
MAX_ANSWERS = 4096  # prompts x n of one request, whichever server answers; each may allow fewer

_WORDS = {
    "int": "an integer", "float": "a number", "str": "a string", "bool": "a boolean", "array": "a list",
    "object": "an object", "null": "null",
}  # fmt: skip
_TYPE_ERROR = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
_RANGE_ERROR = re.compile(r"Expected `[^`]+` (<=|>=) (-?\d+)")
_MISSING = re.compile(r"Object missing required field `([^`]+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]+)`")  # of types that forbid them
_PATH = re.compile(r" - at `\$\.?(.*)`$")
# The first half of a surrogate pair without the second: msgspec takes it for a body that ends too early.
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")


def parse(body: bytes, request_type: type[RequestT]) -> tuple[RequestT, list[FieldWarning]]:
    """Raises `InvalidRequest`."""
    raw = decode_object(body)
    request = typed(raw, request_type)
    return request, unused(raw, request)


def unused(raw: dict[str, Any], request: msgspec.Struct) -> list[FieldWarning]:
    """About the fields of `raw`, at any depth, that the request made from it does not have. Raises `InvalidRequest`."""
    warnings = list(_unused(raw, request, ""))
    if len(warnings) > MAX_WARNINGS:
        more = len(warnings) - MAX_WARNINGS
        warnings[MAX_WARNINGS:] = [FieldWarning("", f"{more} more fields were not used")]
    return warnings


def typed(raw: dict[str, Any], request_type: type[RequestT]) -> RequestT:
    """Says nothing about fields that the type does not have. Raises `InvalidRequest`."""
    try:
        return msgspec.convert(raw, request_type)
    except msgspec.ValidationError as error:
        raise _explain(str(error), request_type) from None


def strict_refusal(warnings: list[FieldWarning]) -> InvalidRequest:
    """The error for `warnings` in strict mode. It says what would happen to each field otherwise."""
    what = "; ".join(f"{warning.param}: {warning.message}" for warning in warnings)
    return InvalidRequest(f"strict mode refuses this request; without it: {what}", param=warnings[0].param)


def warning_headers(warnings: list[FieldWarning]) -> dict[str, str]:
    """`X-Tonle-Warnings: 2; user, top_a`. Field names come from the caller: only plain ASCII goes into a header."""
    if not warnings:
        return {}
    names = ", ".join(warning.param for warning in warnings).encode("unicode_escape").decode()
    return {"x-tonle-warnings": f"{len(warnings)}; {names}"[:MAX_HEADER_CHARS].rstrip()}


def decode_object(body: bytes) -> dict[str, Any]:
    """A body that must be a JSON object, within the bounds. Raises `InvalidRequest`."""
    if not body:
        raise InvalidRequest("the body is empty; send a JSON object")
    raw = _decode(body)
    if not isinstance(raw, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {_word(raw)}")
    if len(raw) > MAX_FIELDS:
        raise InvalidRequest(f"the body has {len(raw)} fields; at most {MAX_FIELDS} are allowed")
    if "n" in raw or type(raw.get("prompt")) is list:
        _check_answers(raw.get("prompt"), raw.get("n"))
    return raw


def _check_answers(prompt: Any, n: Any) -> None:
    """How many answers a body asks for; of values that make no sense, the server that answers will tell."""
    num_prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    num_each = n if isinstance(n, int) and n > 1 else 1
    if num_each > MAX_ANSWERS:
        raise InvalidRequest(f"n must be at most {MAX_ANSWERS}", param="n")
    if num_prompts * num_each > MAX_ANSWERS:
        raise InvalidRequest(
            f"{num_prompts} prompts x n {num_each} are more than the {MAX_ANSWERS} answers one request may have",
            param="prompt",
        )


def _decode(body: bytes) -> Any:
    try:
        return decode_json(body)
    except UnicodeDecodeError:
        raise InvalidRequest(f"the body is not valid UTF-8 (byte {_first_bad_byte(body)})") from None
    except msgspec.ValidationError:  # a number no float or integer can hold
        raise InvalidRequest("the body contains a number that is out of range") from None
    except msgspec.DecodeError as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        if reason == "Input data was truncated":
            reason = f"it ends too early (byte {len(body)})"
            if half := _HALF_PAIR.search(body):
                reason = f"it has half of a surrogate pair (byte {half.start()})"
        raise InvalidRequest(f"the body is not valid JSON: {reason}") from None


def _first_bad_byte(body: bytes) -> int:
    # msgspec counts from the start of the string it is in; the caller needs the place in the body
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return error.start
    return 0


def _word(value: Any) -> str:
    kinds = {bool: "bool", int: "int", float: "float", str: "str", list: "array", type(None): "null"}
    return _WORDS[kinds[type(value)]]


def _explain(error: str, request_type: type[msgspec.Struct]) -> InvalidRequest:
    """msgspec's message in the words of this API. Example: "max_tokens must be an integer, not a string"."""
    path = found.group(1) if (found := _PATH.search(error)) else ""
    subject = path or "the body"
    if missing := _MISSING.match(error):
        field = f"{path}.{missing.group(1)}" if path else missing.group(1)
        return InvalidRequest(f"{field} is missing", param=field)
    if wrong := _TYPE_ERROR.match(error):
        expected = " or ".join(_WORDS.get(kind, kind) for kind in wrong.group(1).split(" | ") if kind != "null")
        got = "a number with a fraction" if wrong.group(2) == "float" else _WORDS.get(wrong.group(2), wrong.group(2))
        return InvalidRequest(f"{subject} must be {expected}, not {got}", param=path or None)
    if bound := _RANGE_ERROR.match(error):
        word = "at most" if bound.group(1) == "<=" else "at least"
        return InvalidRequest(f"{subject} must be {word} {bound.group(2)}", param=path or None)
    if error.startswith("Invalid enum value") and (words := allowed_values(request_type, path)):
        return InvalidRequest(f"{path} must be one of {', '.join(words)}", param=path)
    if unknown := _UNKNOWN.match(error):
        field = f"{path}.{unknown.group(1)}" if path else unknown.group(1)
        return InvalidRequest(f"there is no field {field}", param=field)
    return InvalidRequest(f"{subject}: {_PATH.sub('', error)}", param=path or None)


def _unused(raw: Any, typed: Any, path: str) -> Iterator[FieldWarning]:
    """Fields of the body that are not in the request made from it, at any depth."""
    if isinstance(typed, msgspec.Struct):
        known, holders = _fields(type(typed))
        names = holders if known.issuperset(raw) else raw  # most often there is nothing to say about any other field
        for name in names:
            if name in holders:
                if name in raw:
                    yield from _unused(raw[name], getattr(typed, name), f"{path}{name}.")
            elif (
                name not in known and raw[name] is not None and (message := remark(name, raw[name], type(typed), path))
            ):
                yield FieldWarning((path + name)[:MAX_NAME_CHARS], message)
    elif isinstance(typed, list) and typed and isinstance(typed[0], msgspec.Struct):
        for index, (raw_item, item) in enumerate(zip(raw, typed, strict=True)):
            yield from _unused(raw_item, item, f"{path[:-1]}[{index}].")


@lru_cache
def _fields(struct: type[msgspec.Struct]) -> tuple[frozenset[str], tuple[str, ...]]:
    """The names of its fields, and those of them that hold structs in turn."""
    found = inspect.type_info(struct)
    assert isinstance(found, inspect.StructType)
    holders = tuple(field.name for field in found.fields if _holds_struct(field.type))
    return frozenset(struct.__struct_fields__), holders


def _holds_struct(found: inspect.Type) -> bool:
    if isinstance(found, inspect.Metadata):
        return _holds_struct(found.type)
    if isinstance(found, inspect.UnionType):
        return any(_holds_struct(each) for each in found.types)
    if isinstance(found, inspect.ListType):
        return _holds_struct(found.item_type)
    return isinstance(found, inspect.StructType)
