"""Reading one record for people and programs, whatever its file is by now.

Does: read a regular file of bounded size, check the types that readers rely on, escape what a terminal would obey. Does not:
check that the record is the one that was written (`verify.py`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from tonle.audit.regular_file import read_regular

MAX_RECORD_BYTES = 128 << 20  # of a record that is parsed

# Control characters in UTF-8, but for tab and newline: those above 0x7f begin with 0xc2.
_CONTROL = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]")
_TEXTS = ("id", "endpoint")
_OBJECTS = ("usage", "latency_ms", "route", "sampling")  # or null


def read_record(path: Path) -> dict[str, Any]:
    """Raises `FileNotFoundError`, or `ValueError` if it is no record."""
    try:
        record = msgspec.json.decode(read_regular(path, MAX_RECORD_BYTES))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(record, dict) or not isinstance(record.get("chain"), dict):
        raise ValueError("it is not a record")
    for name in _TEXTS:
        if not isinstance(record.get(name), str):
            raise ValueError(f"it is not a record: {name} is not text")
    for name in _OBJECTS:
        if not isinstance(record.get(name), dict | None):
            raise ValueError(f"it is not a record: {name} is not an object")
    return record


def escape_controls(json: bytes) -> bytes:
    """The same JSON with its control characters escaped, so that a record cannot move a terminal's cursor."""
    return _CONTROL.sub(lambda match: b"\\u%04x" % match[0][-1], json)
