"""Misspelt settings of the Python library: the error names the class, or the function, and the nearest setting that exists.

Does: word the message, and give a dataclass a constructor that uses it. Does not: read the command line, the environment or
a file (`load_settings.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, TypeVar

T = TypeVar("T", bound=type)


def unknown_setting(owner: str, name: str, known: Iterable[str]) -> str:
    """The message about `name`. `owner`: a class, or a function with its brackets."""
    known = list(known)
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(known))}"
    return f"{owner} has no setting {name!r}; {hint}"


def named_settings(cls: T) -> T:
    """A decorator of dataclasses: a keyword that is no field raises `TypeError` with the nearest one. Others cost nothing."""
    known = [field.name for field in fields(cls)]
    construct: Any = cls.__init__  # type: ignore[misc]

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **settings: Any) -> None:  # noqa: N807
        try:
            construct(self, *args, **settings)
        except TypeError:
            for name in settings:
                if name not in known:
                    raise TypeError(unknown_setting(cls.__name__, name, known)) from None
            raise

    cls.__init__ = __init__  # type: ignore[misc]
    return cls
