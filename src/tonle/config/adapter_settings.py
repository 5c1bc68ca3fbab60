"""The adapters that a setting lists.

Does: read `NAME=PATH` in all its spellings. Does not: open a path.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tonle.config.adapter_names import wrong_adapter_name
from tonle.config.values import ValueType


def adapters() -> ValueType:
    """Adapters by name. In a file: a mapping, or a list; elsewhere NAME=PATH, separated by commas or given several times.

    vLLM's objects `{"name": …, "path": …}` are read too.
    """

    def read(value: object) -> tuple[tuple[str, str], ...]:
        found: dict[str, str] = {}
        for name, path in _pairs(value):
            if (wrong := wrong_adapter_name(name)) is not None:
                raise ValueError(f"must be NAME=PATH: {wrong}")
            if name in found:
                raise ValueError(f"must name each adapter once; {name} is there twice")
            found[name] = path
        return tuple(found.items())

    return ValueType("NAME=PATH", read, lambda pairs: ", ".join("=".join(pair) for pair in pairs))


def _pairs(value: Any) -> list[tuple[str, str]]:
    if isinstance(value, str):
        return _from_text(value)
    if isinstance(value, dict):
        if set(value) >= {"name", "path"} and set(value) <= {"name", "path", "base_model_name"}:
            return [_pair(value["name"], value["path"], value)]
        return [_pair(name, path, value) for name, path in value.items()]
    if isinstance(value, list | tuple):
        return [pair for item in value for pair in _pairs(item)]
    raise _wrong(value)


def _from_text(text: str) -> list[tuple[str, str]]:
    """One or several, separated by commas; a comma that no NAME= follows is part of a path."""
    if text.lstrip().startswith(("{", "[")):
        try:
            return _pairs(json.loads(text))
        except json.JSONDecodeError:
            raise _wrong(text) from None
    pairs = []
    for part in re.split(r",(?=\s*[^,=]+=)", text):
        name, _, path = part.partition("=")
        pairs.append(_pair(name.strip(), path.strip(), text))
    return pairs


def _pair(name: Any, path: Any, value: Any) -> tuple[str, str]:
    if not isinstance(name, str) or not isinstance(path, str) or not name or not path:
        raise _wrong(value)
    return name, path


def _wrong(value: Any) -> ValueError:
    is_plain = isinstance(value, str) and not value.lstrip().startswith(("{", "["))
    objects = "" if is_plain else ' or {"name": NAME, "path": PATH}'
    return ValueError(f"must be NAME=PATH{objects}, for example khmer-qa=/adapters/khmer-qa, not {value!r}")
