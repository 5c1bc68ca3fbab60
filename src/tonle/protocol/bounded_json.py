"""`decode_json`: JSON from a caller, within bounds: so deep, so many values, and no number that takes long to read.

Does: count in the bytes before decoding, at the speed of C; measure the depth after. Does not: explain what is wrong with
text that is not JSON (`parse.py`), or know which fields a request has.

Decoding cannot be interrupted and holds the event loop, and a byte of `[5],[5],…` costs a hundred times what a byte of
text costs. So a body is bounded by what it holds as well as by its size. What stands inside a string is text and never
counts: a prompt may be full of brackets and commas.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from tonle.errors import InvalidRequest

MAX_DEPTH = 128  # lists and objects inside each other; a JSON schema ten objects deep in a tool has about 30
MAX_CONTAINERS = 48_000  # lists and objects: a chat of ten thousand messages in parts, 128 tools with schemas of 8 kB
MAX_STRINGS = 150_000  # texts and names of fields
MAX_VALUES = 1_100_000  # of all kinds: a prompt of a million token ids
MAX_FRACTIONS = 10_000  # numbers with a fraction or an exponent: they take ten times as long as integers
MAX_DIGITS = 100  # of one number in a large text: long integers take quadratic time

# No larger than this, a text may hold what it likes, as long as it is not too deep: it is decoded in some milliseconds.
SMALL_BYTES = 256 * 1024

_DIGITS_AND_SPACE = b"0123456789+- \t\r\n"
_SAME_DIGIT = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_NUMBER = b"0" * (MAX_DIGITS + 1)


def decode_json(text: bytes, name: str | None = None) -> Any:
    """`name`: the field that holds this text, if it is not the body itself.

    Raises `InvalidRequest` beyond a bound, `msgspec.DecodeError` or `UnicodeDecodeError` if it is not JSON.
    """
    if len(text) > SMALL_BYTES:
        _check_counts(_outside_strings(text, name), name)
    try:
        value = _decode(text)
    except RecursionError:
        raise _too_deep(name) from None
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH and _is_deep(value, MAX_DEPTH):
        raise _too_deep(name or _deep_field(value))
    return value


def _float(text: str) -> float:
    """msgspec's own way takes 17 µs for the worst numbers of 20 letters, Python's less than one."""
    value = float(text)
    if math.isinf(value):
        raise ValueError("out of range")
    return value


_decode = msgspec.json.Decoder(float_hook=_float).decode


def _outside_strings(text: bytes, name: str | None) -> bytes:
    if b"\\" in text:
        text = text.replace(rb"\\", b"").replace(rb"\"", b"")  # in this order: what is left of \\" ends a string
    if text.count(b'"') > 2 * MAX_STRINGS:
        raise _too_many(name, MAX_STRINGS, "strings (names of fields are strings too)")
    return b"".join(text.split(b'"')[::2])


def _check_counts(outside: bytes, name: str | None) -> None:
    """`outside`: the text without its strings."""
    marks = outside.translate(None, _DIGITS_AND_SPACE)
    if marks.count(b"[") + marks.count(b"{") > MAX_CONTAINERS:
        raise _too_many(name, MAX_CONTAINERS, "lists and objects")
    if marks.count(b",") > MAX_VALUES:
        raise _too_many(name, MAX_VALUES, "values")
    num_es = marks.count(b"e") + marks.count(b"E") - marks.count(b"true") - marks.count(b"false")
    if marks.count(b".") + num_es > MAX_FRACTIONS:
        raise _too_many(name, MAX_FRACTIONS, "numbers with a fraction or an exponent")
    if _LONG_NUMBER in outside.translate(_SAME_DIGIT):
        raise InvalidRequest(f"{name or 'the body'} holds a number of more than {MAX_DIGITS} digits", param=name)


def _is_deep(value: Any, most: int) -> bool:
    """More than `most` lists and objects stand inside each other."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(most):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) is dict or type(inner) is list
        ]
        if not level:
            return False
    return bool(level)


def _deep_field(value: Any) -> str | None:
    fields = value.items() if isinstance(value, dict) else ()
    return next((name for name, inner in fields if _is_deep(inner, MAX_DEPTH - 1)), None)


def _too_many(name: str | None, most: int, what: str) -> InvalidRequest:
    return InvalidRequest(f"{name or 'the body'} holds more than {most} {what}; send fewer", param=name)


def _too_deep(name: str | None) -> InvalidRequest:
    return InvalidRequest(
        f"{name or 'the body'} is nested too deeply: at most {MAX_DEPTH} lists and objects may stand inside each other",
        param=name,
    )
