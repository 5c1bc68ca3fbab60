"""Finding personal data in text: built-in patterns, patterns of the user, and the words that replace what they find.

Does: mask strings, also deep inside JSON values, in all fields of a record or in one, and count. Does not: read or
write records. Patterns find what looks like personal data; names, or an address written in words, they do not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tonle.audit.seal import CONTENT
from tonle.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Pattern:
    name: str
    regex: re.Pattern[str]
    is_real: Callable[[str], bool] = lambda found: True  # a second look at what the expression found


def is_card(found: str) -> bool:
    """Luhn's check digit, over 13 to 19 digits."""
    digits = [int(char) for char in found if char.isdigit()]
    if not 13 <= len(digits) <= 19:
        return False
    doubled = [digit * 2 - 9 * (digit > 4) for digit in digits[-2::-2]]
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def is_iban(found: str) -> bool:
    """ISO 7064: letters become numbers, the whole leaves 1 modulo 97."""
    compact = found.replace(" ", "").upper()
    if not 15 <= len(compact) <= 34:
        return False
    turned = compact[4:] + compact[:4]
    return int("".join(str(int(char, 36)) for char in turned)) % 97 == 1


def is_phone(found: str) -> bool:
    return 8 <= sum(char.isdigit() for char in found) <= 15


# With a country's or a trunk's prefix: +855 12 345 678, 012-345-678, +1 (555) 123-4567.
_PHONE = r"(?<![\w.])(?:\+\d{1,3}[ .\-]?|0)(?:\(\d{1,4}\)[ .\-]?)?\d{1,4}(?:[ .\-]?\d{2,4}){2,4}(?!\d)"

# In this order: what one has masked the next does not see, so the stricter come first.
BUILT_IN = {
    pattern.name: pattern
    for pattern in (
        Pattern("email", re.compile(r"[A-Za-z0-9._%+\-]{1,64}@(?:[A-Za-z0-9\-]{1,63}\.){1,8}[A-Za-z]{2,24}")),
        Pattern("iban", re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b"), is_iban),
        Pattern("card", re.compile(r"(?<![\d.])\d(?:[ \-]?\d){12,18}(?![\d.]\d)"), is_card),
        Pattern("ipv4", re.compile(r"(?<![\d.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\d.]*\d)")),
        Pattern("ssn", re.compile(r"(?<![\d\-])(?!000|666|9\d\d)\d{3}-(?!00)\d{2}-(?!0000)\d{4}(?![\d\-])")),
        Pattern("phone", re.compile(_PHONE), is_phone),
        Pattern("secret", re.compile(r"\b(?:sk|pk|ghp|gho|xox[abp])[-_][A-Za-z0-9_\-]{16,200}\b|\bAKIA[0-9A-Z]{16}\b")),
    )
}  # fmt: skip


class Redactor:
    """A list of patterns. Each match becomes `[name]`."""

    def __init__(self, rules: Iterable[str]) -> None:
        """`rules`: names of built-in patterns, `all` of them, or `name=regex`; after `FIELD:`, only for that field of a
        record. Raises `ConfigError`."""
        wanted: dict[str | None, dict[str, Pattern]] = {}
        for rule in rules:
            field, bare = _field(rule)
            wanted.setdefault(field, {}).update({pattern.name: pattern for pattern in _patterns(bare)})
        everywhere = wanted.pop(None, {})
        self._everywhere = _ordered(everywhere)
        self._of_field = {field: _ordered({**everywhere, **own}) for field, own in wanted.items()}

    def __bool__(self) -> bool:
        return bool(self._everywhere or self._of_field)

    def mask(self, value: Any, counts: Counter[str], *, field: str | None = None) -> Any:
        """The value with every match in every string replaced; the very same object if there was none."""
        return _mask(value, self._of_field.get(field, self._everywhere) if field else self._everywhere, counts)


def _ordered(patterns: dict[str, Pattern]) -> list[Pattern]:
    """Built-in ones first, in their order."""
    own = [name for name in patterns if name not in BUILT_IN]
    return [patterns[name] for name in (*(name for name in BUILT_IN if name in patterns), *own)]


def _mask(value: Any, patterns: list[Pattern], counts: Counter[str]) -> Any:
    if isinstance(value, str):
        return _mask_text(value, patterns, counts)
    if isinstance(value, list):
        items = [_mask(item, patterns, counts) for item in value]
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    if isinstance(value, dict):
        masked = {_mask_text(name, patterns, counts): _mask(item, patterns, counts) for name, item in value.items()}
        same = all(new is old for new, old in zip(masked.values(), value.values(), strict=False))
        return value if same and masked.keys() == value.keys() else masked
    return value


def _mask_text(text: str, patterns: list[Pattern], counts: Counter[str]) -> str:
    for pattern in patterns:

        def replace(match: re.Match[str], pattern: Pattern = pattern) -> str:
            if not pattern.is_real(match[0]):
                return match[0]
            counts[pattern.name] += 1
            return f"[{pattern.name}]"

        text = pattern.regex.sub(replace, text)
    return text


def _field(rule: str) -> tuple[str | None, str]:
    """`output:email` is a rule for one field; a colon inside a regex is none of ours."""
    field, colon, rest = rule.partition(":")
    if not colon or "=" in field:
        return None, rule
    if field not in CONTENT:
        raise ConfigError(f"there is no field {field!r} to mask; there are {', '.join(CONTENT)}", param="redact")
    return field, rest


def _patterns(rule: str) -> list[Pattern]:
    if rule == "all":
        return list(BUILT_IN.values())
    name, has_regex, regex = rule.partition("=")
    if not has_regex:
        if name not in BUILT_IN:
            known = ", ".join(BUILT_IN)
            raise ConfigError(f"there is no pattern {name!r}; there are {known}, all, or name=regex", param="redact")
        return [BUILT_IN[name]]
    try:
        return [Pattern(name, re.compile(regex))]
    except re.error as error:
        raise ConfigError(f"the pattern {name}={regex} is no regular expression: {error}", param="redact") from None
