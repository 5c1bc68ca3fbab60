"""Values of any kind in the form in which they are written: JSON that every reader can open.

A record may hold what a caller, a backend or a program sends: lists inside lists without end, lists that hold themselves,
numbers with a million digits, half of a surrogate pair, objects that fail when they are printed. What JSON can hold within
the bounds below stays as it is. What is nested more deeply, or would become many times longer when it is indented, is kept
as one string, its JSON text. Everything else is converted as well as it can be.

Does: walk values without recursion, bounded in depth and number. Does not: mask (`redaction.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import repeat
from typing import Any, Literal

import msgspec

from tonle.protocol.bounded_json import MAX_DEPTH  # of a body that is accepted; what is deeper is kept as text

MAX_VALUES = 4_000_000  # values in one field; of a list that holds itself there is no end
MAX_CONVERTED = 100_000  # values of one that JSON cannot hold as it is; no request or answer is made of such
MAX_CONVERTED_CHARS = 16 * 1024**2
MAX_SAID_CHARS = 10_000  # of what an object says about itself
MAX_LEVELS = 10_000  # that are looked at before a value counts as endless
MIN_INT, MAX_INT = -(2**63), 2**64 - 1  # what every reader of JSON here can hold
INDENT = 2  # spaces per level in a record's file
GROWTH = 4  # how many times longer indented text may be before it is kept as a string instead
SLACK_BYTES = 64 * 1024  # a value this short may grow as it likes

TOO_DEEP = "[nested too deeply to record]"
CUT = "[the rest is too long to record]"
ITSELF = "[a value that contains itself]"

_CONTAINERS = (Mapping, list, tuple, set, frozenset)

Kind = Literal["plain", "deep", "odd"]


def plain(value: Any) -> Any:
    """The value, or what is written in its place. Never raises."""
    kind = type(value)
    if kind is str or value is None or kind is bool:
        return value
    found = kind_of(value)
    if found == "plain":
        return value
    if found == "deep":
        return _text_of_deep(value)
    text, depth = json_text(value)
    if depth > MAX_DEPTH:
        return text
    copy = msgspec.json.decode(text)
    return copy if kind_of(copy) == "plain" else text


def plain_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Each value of an object made plain by itself, so that one that is not leaves the others as they are."""
    return {name: plain(value) for name, value in fields.items()}


def kind_of(value: Any) -> Kind:
    """`plain`: can be written as it is, but for halves of surrogate pairs. `deep`: JSON, but better kept as text."""
    level: list[Any] = [value]
    depth = num_values = indent_bytes = 0
    while level:
        below: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is str or item is None or kind is bool:
                continue
            if kind is dict:
                for name in item:
                    if type(name) is not str:
                        return "odd"
                below += item.values()
            elif kind is list:
                below += item
            elif kind is int:
                if not MIN_INT <= item <= MAX_INT:
                    return "odd"
            elif kind is not float or item - item != 0:  # of infinity and of NaN, that is NaN
                return "odd"
        if below:
            depth += 1
            num_values += len(below)
            indent_bytes += len(below) * depth * INDENT
            if num_values > MAX_VALUES or depth > MAX_LEVELS:
                return "odd"
        level = below
    if depth > MAX_DEPTH or (
        indent_bytes > SLACK_BYTES and indent_bytes > GROWTH * (2 * num_values + _num_chars(value))
    ):
        return "deep"
    return "plain"


def is_surely_plain(text: bytes) -> bool:
    """Whether JSON text, however it is nested, can be neither deep nor grow much: most records are that small."""
    num_containers = text.count(b"{") + text.count(b"[")
    if num_containers > MAX_DEPTH:
        return False
    max_growth = num_containers * INDENT  # of a value, at the deepest place there can be
    if len(text) // 2 * max_growth <= SLACK_BYTES:
        return True
    return (text.count(b",") + num_containers) * max_growth <= SLACK_BYTES


def _num_chars(value: Any) -> int:
    """Of all strings in a value that is not odd."""
    num_chars, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            num_chars += len(item)
        elif isinstance(item, dict):
            num_chars += sum(map(len, item))
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
    return num_chars


def _text_of_deep(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (RecursionError, UnicodeEncodeError):
        return json_text(value)[0]


def json_text(value: Any) -> tuple[str, int]:
    """JSON for anything, and how deep it is. Never raises; what is too long is cut where it is still JSON."""
    pieces: list[str] = []
    num_values = num_chars = depth = 0
    open_ids: list[int] = []  # of the containers around the current value
    around: set[int] = set()  # the same
    frames: list[tuple[Iterator[tuple[str | None, Any]], str]] = [(iter([(None, value)]), "")]
    is_first = True
    while frames:
        pairs, closing = frames[-1]
        entry = next(pairs, None)
        if entry is None or num_values > MAX_CONVERTED or num_chars > MAX_CONVERTED_CHARS:
            if entry is not None and closing == "]" and pieces[-1] != _CUT_TEXT:
                pieces.append(_CUT_TEXT if is_first else f",{_CUT_TEXT}")
            pieces.append(closing)
            frames.pop()
            if open_ids:
                around.discard(open_ids.pop())
            is_first = False
            continue
        name, item = entry
        num_values += 1
        prefix = "" if is_first else ","
        if name is not None:
            prefix += _quoted(name) + ":"
        is_first = False
        if not isinstance(item, _CONTAINERS):
            text = _scalar_text(item)
        elif id(item) in around:
            text = f'"{ITSELF}"'
        elif len(open_ids) >= MAX_LEVELS:
            text = f'"{TOO_DEEP}"'
        else:
            opening, end, inside = _opened(item)
            frames.append((inside, end))
            open_ids.append(id(item))
            around.add(id(item))
            depth = max(depth, len(open_ids))
            text, is_first = opening, True
        pieces.append(prefix + text)
        num_chars += len(prefix) + len(text)
    return "".join(pieces), depth


_CUT_TEXT = f'"{CUT}"'


def _opened(container: Any) -> tuple[str, str, Iterator[tuple[str | None, Any]]]:
    """How it begins and ends, and what is in it."""
    try:
        if isinstance(container, Mapping):
            return "{", "}", iter([(_name(name), item) for name, item in container.items()])
        return "[", "]", zip(repeat(None), list(container), strict=False)
    except Exception:  # a mapping of another's making
        return "[", "]", iter([(None, f"[{type(container).__name__}]")])


def _name(name: Any) -> str:
    if isinstance(name, str):
        return str.__str__(name)
    return _scalar_text(name).strip('"')


def _scalar_text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(str.__str__(value))
    if isinstance(value, int):
        number = int(value)
        return str(number) if MIN_INT <= number <= MAX_INT else _quoted(_digits(number))
    if isinstance(value, float):
        return repr(float(value)) if math.isfinite(value) else _quoted(str(float(value)))
    if isinstance(value, bytes | bytearray | memoryview):
        return _quoted(bytes(value).decode(errors="replace"))
    return _quoted(said(value))


def _digits(number: int) -> str:
    try:
        return str(number)
    except ValueError:  # Python refuses to print very long ones
        return f"[a number of {number.bit_length()} bits]"


def _quoted(text: str) -> str:
    try:
        return msgspec.json.encode(text).decode()
    except UnicodeEncodeError:
        return msgspec.json.encode(whole_letters(text)).decode()


def whole_letters(text: str) -> str:
    """Halves of surrogate pairs, which no file can hold, replaced."""
    return text.encode(errors="replace").decode()


def said(value: Any) -> str:
    """What an object says about itself, if it can."""
    if isinstance(value, _CONTAINERS):
        return json_text(value)[0][:MAX_SAID_CHARS]
    try:
        return whole_letters(str(value)[:MAX_SAID_CHARS])
    except Exception:
        return f"[{type(value).__name__}]"
