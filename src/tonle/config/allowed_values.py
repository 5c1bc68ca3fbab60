"""`allowed_values`: the words a typed field takes. msgspec refuses others without saying which ones are allowed.

Does: look them up in a type. Does not: check values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from msgspec import inspect

_STEP = re.compile(r"([A-Za-z_]\w*)|\[[^\]]*\]")  # a field, or one of a list


def allowed_values(type_: Any, path: str) -> list[str]:
    """Of the field at `path` in `type_`, such as `arms[0].name`; empty where it takes any value."""
    found = list(_flat(inspect.type_info(type_)))
    for step in _STEP.finditer(path):
        found = [leaf for each in found for inner in _inside(each, step.group(1)) for leaf in _flat(inner)]
    return [str(value) for each in found if isinstance(each, inspect.LiteralType) for value in each.values]


def _flat(kind: inspect.Type) -> Iterator[inspect.Type]:
    """Without what only wraps: unions, and bounds beside a type."""
    if isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from _flat(each)
    elif isinstance(kind, inspect.Metadata):
        yield from _flat(kind.type)
    else:
        yield kind


def _inside(kind: inspect.Type, name: str | None) -> list[inspect.Type]:
    if name is None:
        return [kind.item_type] if isinstance(kind, inspect.CollectionType) else []
    fields = kind.fields if isinstance(kind, inspect.StructType) else ()
    return [field.type for field in fields if field.encode_name == name]
