"""Whether the fields of a settings object have the types its class declares.

Python does not check when such an object is made. Does: name the field and the type it must have, in words. Does not: check
ranges.
"""

from __future__ import annotations

import types
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

_WORDS = {
    int: "a whole number", float: "a number", bool: "True or False", str: "a string", list[str]: "a list of strings",
    list[int]: "a list of whole numbers", dict[int, float]: "a dict of whole numbers to numbers",
    dict[str, Any]: "a dict of names to values", dict[str, str]: "a dict {NAME: PATH}",  # `lora`
    type(None): "None",
}  # fmt: skip
_SHOWN_CHARS = 60  # of a wrong value


def wrong_type(settings: Any) -> tuple[str, str] | None:
    """The first field with a value of another type than declared, and the sentence about it. None: no field is wrong.

    `settings` is a dataclass or a msgspec Struct. Costs a microsecond or two.
    """
    try:
        msgspec.convert(msgspec.to_builtins(settings), type(settings))
    except (msgspec.ValidationError, TypeError):
        for name, hint in get_type_hints(type(settings)).items():
            value = getattr(settings, name)
            if not _fits(value, hint):
                shown = repr(value)
                shown = shown if len(shown) <= _SHOWN_CHARS else shown[:_SHOWN_CHARS] + "…"
                return name, f"{name} must be {_words(hint)}, not {shown}"
    return None


def _fits(value: Any, hint: Any) -> bool:
    try:
        msgspec.convert(msgspec.to_builtins(value), hint)
    except (msgspec.ValidationError, TypeError):
        return False
    return True


def _words(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_words(part) for part in get_args(hint))
    return _WORDS.get(hint, str(hint))
