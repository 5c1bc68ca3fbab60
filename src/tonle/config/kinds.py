"""What a knob's value may look like, and how text, YAML and flags become it. One reader per kind, so all three agree.

A reader takes what a YAML file gives (int, float, bool, str, list) or the text of a variable or flag, and raises
`ValueError` with a sentence that begins with "must".
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|[KMGT]i?B?)?", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)?")
_POWERS = "BKMGT"
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True, slots=True)
class Kind:
    """How values of one kind are read, and how they are written in a help text."""

    metavar: str
    read: Callable[[object], Any]
    show: Callable[[Any], str] = str


def whole(low: int, high: int | None = None) -> Kind:
    """A whole number from `low` to `high`."""
    wanted = f"a whole number from {low} to {high}" if high is not None else f"a whole number, at least {low}"

    def read(value: object) -> int:
        number = _int(value)
        if number is None or number < low or (high is not None and number > high):
            raise ValueError(f"must be {wanted}, not {value!r}")
        return number

    return Kind("N", read)


def size(low: int = 1) -> Kind:
    """Bytes: `2GiB` and `2G` are 2 * 1024**3, `2GB` is 2 * 1000**3, a bare number counts bytes."""

    def read(value: object) -> int:
        num_bytes = _size(value)
        if num_bytes is None or num_bytes < low:
            raise ValueError(f"must be a size such as 2GiB, 512MB or a number of bytes, not {value!r}")
        return num_bytes

    return Kind("SIZE", read, show_size)


def duration() -> Kind:
    """Seconds, or a number with its unit: 500ms, 30s, 2m, 1h."""

    def read(value: object) -> float:
        seconds = _duration(value)
        if seconds is None:
            raise ValueError(f"must be a duration such as 500ms, 30s, 2m or a number of seconds, not {value!r}")
        return seconds

    return Kind("TIME", read, lambda seconds: f"{seconds:g}s")


def share() -> Kind:
    """More than 0, at most 1: 0.9, or 90%."""

    def read(value: object) -> float:
        number = _share(value)
        if number is None or not 0 < number <= 1:
            raise ValueError(f"must be a share such as 0.9 or 90%, more than 0 and at most 1, not {value!r}")
        return number

    return Kind("SHARE", read, lambda number: f"{number:g}")


def text() -> Kind:
    def read(value: object) -> str:
        if not isinstance(value, str) or not value:
            raise ValueError(f"must be text, not {value!r}")
        return value

    return Kind("TEXT", read)


def pattern(regex: str, wanted: str) -> Kind:
    """Text of a certain form, described by `wanted`."""

    def read(value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(regex, value):
            raise ValueError(f"must be {wanted}, not {value!r}")
        return value

    return Kind("TEXT", read)


def choice(*options: str) -> Kind:
    """One of these words, in any case."""

    def read(value: object) -> str:
        for option in options:
            if isinstance(value, str) and value.lower() == option.lower():
                return option
        raise ValueError(f"must be one of {', '.join(options)}, not {value!r}")

    return Kind("NAME", read)


def names() -> Kind:
    """A list of names; in text, commas separate them."""

    def read(value: object) -> tuple[str, ...]:
        texts: Any = [value] if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"must be a name or a list of names, not {value!r}")
        parts = [part.strip() for text in texts for part in text.split(",")]
        if not all(parts):
            raise ValueError(f"must be names that are not empty, not {value!r}")
        return tuple(parts)

    return Kind("NAME", read, lambda parts: ", ".join(parts))


def switch() -> Kind:
    def read(value: object) -> bool:
        if isinstance(value, bool):
            return value
        truth = _TRUTH.get(str(value).strip().lower())
        if truth is None:
            raise ValueError(f"must be true or false, not {value!r}")
        return truth

    return Kind("", read, lambda on: "on" if on else "off")


def networks() -> Kind:
    """Addresses and networks: 10.0.0.7, 10.0.0.0/8, fd00::/8; in text, commas separate them."""

    def read(value: object) -> tuple[str, ...]:
        parts: tuple[str, ...] = names().read(value)
        for part in parts:
            try:
                ipaddress.ip_network(part)
            except ValueError:
                raise ValueError(f"must be addresses or networks such as 10.0.0.0/8, not {part!r}") from None
        return parts

    return Kind("CIDR", read, lambda parts: ", ".join(parts))


def rules() -> Kind:
    """Names and `name=regex`. Commas separate names; a regex may have commas of its own and goes to the text's end."""

    def read(value: object) -> tuple[str, ...]:
        texts: Any = [value] if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"must be a name, name=regex, or a list of them, not {value!r}")
        parts = [part.strip() for text in texts for part in _rule_parts(text)]
        if not all(parts):
            raise ValueError(f"must be rules that are not empty, not {value!r}")
        return tuple(parts)

    return Kind("RULE", read, lambda parts: ", ".join(parts))


def _rule_parts(text: str) -> list[str]:
    before, equals, regex = text.partition("=")
    *names, last = before.split(",")
    return [*names, last + equals + regex]


def json_object() -> Kind:
    """A mapping in a file; a JSON object elsewhere."""

    def read(value: object) -> dict[str, Any]:
        try:
            found = json.loads(value) if isinstance(value, str) else value
        except ValueError:
            found = None
        if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
            raise ValueError(f"must be a JSON object such as '{{\"temperature\": 0.5}}', not {value!r}")
        return found

    return Kind("JSON", read, json.dumps)


def optional(kind: Kind, *, none: str) -> Kind:
    """`kind`, or nothing: `null` in a file, the word `none` elsewhere. `none` says in help texts what that means."""

    def read(value: object) -> Any:
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            return None
        return kind.read(value)

    return Kind(kind.metavar, read, lambda value: none if value is None else kind.show(value))


def show_size(num_bytes: int) -> str:
    """Exactly, in the largest binary unit that divides it: 1GiB, 1536MiB, 1000B."""
    for unit, power in (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if num_bytes and num_bytes % 1024**power == 0:
            return f"{num_bytes // 1024**power}{unit}"
    return f"{num_bytes}B"


def _int(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]+\s*", value) else None


def _size(value: object) -> int | None:
    if not isinstance(value, str):
        return _int(value)
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        return None
    unit = (match[2] or "B").upper()
    base = 1000 if unit.endswith("B") and "I" not in unit else 1024
    return int(float(match[1]) * base ** _POWERS.index(unit[0]))


def _duration(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if math.isfinite(value) and value >= 0 else None
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    return None if match is None else float(match[1]) * _SECONDS[match[2] or "s"]


def _share(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*(%)?", value.strip()) if isinstance(value, str) else None
    return None if match is None else float(match[1]) / (100 if match[2] else 1)
