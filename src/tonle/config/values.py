"""The types of values a setting may have: how each is read from YAML, a variable or a flag, and shown in help texts.

A reader takes what a YAML file gives (int, float, bool, str, list) or the text of a variable or flag, and raises
`ValueError` with a sentence that begins with "must". One reader per type, so that file, variable and flag agree.
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|[KMGT]i?B?)?", re.IGNORECASE)
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)\s*")
_DURATION = re.compile(rf"\d+(?:\.\d+)?|({_DURATION_PART.pattern})+")
_POWERS = "BKMGT"
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_TOKENS = re.compile(r"(\d+)(?:\.(\d+))?\s*([kKmMgG])?")
_TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True, slots=True)
class ValueType:
    """How values of one type are read, and how they are shown in a help text."""

    metavar: str
    read: Callable[[object], Any]
    show: Callable[[Any], str] = str


def integer(low: int, high: int | None = None) -> ValueType:
    """A whole number from `low` to `high`."""
    wanted = f"a whole number from {low} to {high}" if high is not None else f"a whole number, at least {low}"

    def read(value: object) -> int:
        number = _int(value)
        if number is None or number < low or (high is not None and number > high):
            raise ValueError(f"must be {wanted}, not {value!r}")
        return number

    return ValueType("N", read)


def number() -> ValueType:
    """More than 0: 4 or 0.5."""

    def read(value: object) -> float:
        found = _fraction(value) if not str(value).strip().endswith("%") else None
        if found is None or not 0 < found < math.inf:
            raise ValueError(f"must be a number such as 4 or 0.5, more than 0, not {value!r}")
        return found

    return ValueType("N", read, lambda found: f"{found:g}")


def tokens(low: int) -> ValueType:
    """A number of tokens: 4096, 4k (4,000) or 4K (4,096), as vLLM writes them."""

    def read(value: object) -> int:
        number = _tokens(value)
        if number is None or number < low:
            raise ValueError(f"must be a number of tokens such as 4096, 32k or 32K, at least {low}, not {value!r}")
        return number

    return ValueType("TOKENS", read)


def size(low: int = 1) -> ValueType:
    """Bytes: `2GiB` and `2G` are 2 * 1024**3, `2GB` is 2 * 1000**3, a bare number counts bytes."""

    def read(value: object) -> int:
        num_bytes = _size(value)
        if num_bytes is None or num_bytes < low:
            raise ValueError(f"must be a size such as 2GiB, 512MB or a number of bytes, not {value!r}")
        return num_bytes

    return ValueType("SIZE", read, show_size)


def duration() -> ValueType:
    """Seconds, or numbers with their units: 500ms, 30s, 2m, 6m30s, 1h."""

    def read(value: object) -> float:
        seconds = _duration(value)
        if seconds is None:
            raise ValueError(f"must be a duration such as 500ms, 30s, 2m or a number of seconds, not {value!r}")
        return seconds

    return ValueType("TIME", read, lambda seconds: f"{seconds:g}s")


def milliseconds() -> ValueType:
    """More than 0: a number of milliseconds, or a number with its unit: 50, 50ms, 0.05s."""

    def read(value: object) -> float:
        number = str(value).strip() if isinstance(value, int | float | str) and not isinstance(value, bool) else ""
        seconds = _duration(number if number[-1:].isalpha() else f"{number}ms")
        if not seconds:
            raise ValueError(f"must be a number of milliseconds above 0, such as 50, 50ms or 0.05s, not {value!r}")
        return seconds * 1e3

    return ValueType("MS", read, lambda ms: f"{ms:g}ms")


def fraction() -> ValueType:
    """More than 0, at most 1: 0.9, or 90%."""

    def read(value: object) -> float:
        number = _fraction(value)
        if number is None or not 0 < number <= 1:
            raise ValueError(f"must be a fraction such as 0.9 or 90%, more than 0 and at most 1, not {value!r}")
        return number

    return ValueType("FRACTION", read, lambda number: f"{number:g}")


def text(metavar: str = "TEXT") -> ValueType:
    def read(value: object) -> str:
        if not isinstance(value, str) or not value:
            raise ValueError(f"must be text, not {value!r}")
        return value

    return ValueType(metavar, read)


def path() -> ValueType:
    return text("PATH")


def secret() -> ValueType:
    """Text that help and messages never show."""

    def read(value: object) -> str:
        if not isinstance(value, str) or not value:
            raise ValueError("must be text that is not empty")
        return value

    return ValueType("TEXT", read, lambda _: "")


def pattern(regex: str, wanted: str) -> ValueType:
    """Text of a certain form, described by `wanted`."""

    def read(value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(regex, value):
            raise ValueError(f"must be {wanted}, not {value!r}")
        return value

    return ValueType("TEXT", read)


def choice(*options: str, also: Mapping[str, str] | None = None) -> ValueType:
    """One of these words, in any case. `also`: other words for them, which messages do not mention."""
    known = {option.lower(): option for option in options} | dict(also or {})

    def read(value: object) -> str:
        if isinstance(value, str) and value.lower() in known:
            return known[value.lower()]
        raise ValueError(f"must be one of {', '.join(options)}, not {value!r}")

    return ValueType("NAME", read)


def names(metavar: str = "NAME") -> ValueType:
    """A list of names; in text, commas separate them."""

    def read(value: object) -> tuple[str, ...]:
        texts: Any = [value] if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"must be a name or a list of names, not {value!r}")
        parts = [part.strip() for text in texts for part in text.split(",")]
        if not all(parts):
            raise ValueError(f"must be names that are not empty, not {value!r}")
        return tuple(parts)

    return ValueType(metavar, read, lambda parts: ", ".join(parts))


def boolean() -> ValueType:
    def read(value: object) -> bool:
        if isinstance(value, bool):
            return value
        truth = _TRUTH.get(str(value).strip().lower())
        if truth is None:
            raise ValueError(f"must be true or false, not {value!r}")
        return truth

    return ValueType("", read, lambda on: "on" if on else "off")


def networks() -> ValueType:
    """Addresses and networks: 10.0.0.7, 10.0.0.0/8, fd00::/8; in text, commas separate them."""

    def read(value: object) -> tuple[str, ...]:
        parts: tuple[str, ...] = names().read(value)
        for part in parts:
            try:
                ipaddress.ip_network(part)
            except ValueError:
                raise ValueError(f"must be addresses or networks such as 10.0.0.0/8, not {part!r}") from None
        return parts

    return ValueType("CIDR", read, lambda parts: ", ".join(parts))


def rules() -> ValueType:
    """Names and `name=regex`. Commas separate names; a regex may have commas of its own and goes to the text's end."""

    def read(value: object) -> tuple[str, ...]:
        texts: Any = [value] if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"must be a name, name=regex, or a list of them, not {value!r}")
        parts = [part.strip() for text in texts for part in _rule_parts(text)]
        if not all(parts):
            raise ValueError(f"must be rules that are not empty, not {value!r}")
        return tuple(parts)

    return ValueType("RULE", read, lambda parts: ", ".join(parts))


def _rule_parts(text: str) -> list[str]:
    before, equals, regex = text.partition("=")
    *names, last = before.split(",")
    return [*names, last + equals + regex]


def json_object() -> ValueType:
    """A mapping in a file; a JSON object elsewhere."""

    def read(value: object) -> dict[str, Any]:
        try:
            found = json.loads(value) if isinstance(value, str) else value
        except ValueError:
            found = None
        if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
            raise ValueError(f"must be a JSON object such as '{{\"temperature\": 0.5}}', not {value!r}")
        return found

    return ValueType("JSON", read, json.dumps)


def optional(inner: ValueType, *, none: str, also: tuple[str, ...] = ()) -> ValueType:
    """`inner`, or nothing: `null` in a file, the word `none` elsewhere. `none` says in help texts what that means.

    `also`: other words for nothing.
    """

    def read(value: object) -> Any:
        if value is None or str(value).lower() in ("none", *also):
            return None
        return inner.read(value)

    return ValueType(inner.metavar, read, lambda value: none if value is None else inner.show(value))


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


def _tokens(value: object) -> int | None:
    """A small letter counts in thousands, a capital one in 1,024s."""
    if not isinstance(value, str):
        return _int(value)
    match = _TOKENS.fullmatch(value.strip())
    if match is None or not match[0].isascii():
        return None
    whole, decimals, unit = match.groups()
    scale = (1000 if unit.islower() else 1024) ** ("kmg".index(unit.lower()) + 1) if unit else 1
    number, rest = divmod(int(whole + (decimals or "")) * scale, 10 ** len(decimals or ""))
    return None if rest else number


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
    if not isinstance(value, str) or _DURATION.fullmatch(text := value.strip()) is None:
        return None
    parts = [(float(number), _SECONDS[unit]) for number, unit in _DURATION_PART.findall(text)] or [(float(text), 1.0)]
    units = [unit for _, unit in parts]
    if units != sorted(set(units), reverse=True):  # 30s2m, 1m1m
        return None
    return sum(number * unit for number, unit in parts)


def _fraction(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*(%)?", value.strip()) if isinstance(value, str) else None
    return None if match is None else float(match[1]) / (100 if match[2] else 1)
