"""Arguments that a format does not write as JSON: one by one, they become the members of a JSON object.

Does: `{"a": 1`, then `, "b": 2`, then `}`, as values come; what a literal of Python or JSON means. Does not: find where a value
ends.
"""

from __future__ import annotations

import ast
import json
from typing import Any

from tonle.chat_formats.part_list import PartList

_CONSTANTS = {"true": True, "false": False, "null": None}


class Members:
    """Of the arguments of one call, which it begins."""

    def __init__(self, name: str, parts: PartList) -> None:
        self._parts = parts
        self._num_members = 0
        parts.begin_call(name)

    def key(self, key: str) -> None:
        """The value follows, in pieces, with `piece`."""
        before = ", " if self._num_members else "{"
        self._num_members += 1
        self._parts.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")

    def piece(self, text: str) -> None:
        self._parts.arguments(text)

    def add(self, key: str, value: Any) -> None:
        self.key(key)
        self.piece(json.dumps(value, ensure_ascii=False))

    def end(self) -> None:
        self._parts.arguments("}" if self._num_members else "{}")


def literal_value(written: str) -> Any:
    """What a value means that is written as JSON or Python write it; where it means nothing, the text itself."""
    written = written.strip()
    if written in _CONSTANTS:
        return _CONSTANTS[written]
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(written)
            json.dumps(value, allow_nan=False)  # Python knows values that JSON does not
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        return value
    return written
