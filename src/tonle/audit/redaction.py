"""Finding personal data in text: built-in patterns, patterns of the user, and the words that replace what they find.

Text may hold JSON as text: a body that could not be parsed, or the arguments of a tool call. There, `\\u0040` is an @, and
patterns see it as one.

Does: mask strings, also deep inside JSON values and without recursion, in all fields of a record or in one, and count.
Does not: read or write records. Patterns find what looks like personal data; names, or an address written in words, they
do not.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tonle.audit.seal import CONTENT
from tonle.errors import ConfigError

# All fields of a record that a caller, a backend or a client's address can have a part in.
MASKED = (
    *CONTENT, "request_id", "response_id", "endpoint", "client", "key_id", "model", "model_config", "adapter",
    "finish_reason", "usage", "sampling", "cache", "route", "experiment", "warnings",
)  # fmt: skip
MAX_ESCAPES = 3  # JSON inside JSON inside JSON
CARD_DIGITS = 10**12  # a number from which on it may be a card's
# Ids that this server or an engine draws look like numbers to a pattern, and mean nothing.
_DRAWN_ID = re.compile(r"(?:[a-z]{2,12}[-_]){0,2}(?:[0-9a-f]{24}|[0-9a-f]{32})|key-[0-9a-f]{10}")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|([\"\\/bfnrt]))")
_ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


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
        Pattern("email", re.compile(r"(?<![A-Za-z0-9._%+\-])[A-Za-z0-9._%+\-]++@(?:[A-Za-z0-9\-]{1,63}\.){1,8}[A-Za-z]{2,24}")),
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
        patterns = self._of_field.get(field, self._everywhere) if field else self._everywhere
        if not patterns:
            return value
        if isinstance(value, str):
            return _mask_text(value, patterns, counts)
        num_before = counts.total()
        masked = _mask(value, patterns, counts)
        return masked if counts.total() > num_before else value


def _ordered(patterns: dict[str, Pattern]) -> list[Pattern]:
    """Built-in ones first, in their order."""
    own = [name for name in patterns if name not in BUILT_IN]
    return [patterns[name] for name in (*(name for name in BUILT_IN if name in patterns), *own)]


def _mask(value: Any, patterns: list[Pattern], counts: Counter[str]) -> Any:
    """A copy, made from the outside in: each container is filled from its original when its turn comes."""

    def masked(item: Any) -> Any:
        if isinstance(item, str):
            return _mask_text(item, patterns, counts)
        if isinstance(item, dict | list):
            copy: Any = {} if isinstance(item, dict) else []
            waiting.append((item, copy))
            return copy
        if isinstance(item, int) and abs(item) >= CARD_DIGITS:
            text = str(item)
            return item if (new := _mask_text(text, patterns, counts)) == text else new
        return item

    waiting: list[tuple[Any, Any]] = []
    result = masked(value)
    while waiting:
        original, copy = waiting.pop()
        if isinstance(original, list):
            copy.extend([masked(item) for item in original])
            continue
        num_same: Counter[str] = Counter()
        for name, item in original.items():
            new = _mask_text(name, patterns, counts)
            if new != name:  # two names may look the same once they are masked; neither value may go
                num_same[new] += 1
                new = f"{new} {num_same[new]}" if num_same[new] > 1 else new
            copy[new] = masked(item)
    return result


def _mask_text(text: str, patterns: list[Pattern], counts: Counter[str]) -> str:
    if _DRAWN_ID.fullmatch(text):
        return text
    if "\\" in text:
        return _mask_escaped(text, patterns, counts)
    for pattern in patterns:

        def replace(match: re.Match[str], pattern: Pattern = pattern) -> str:
            if not pattern.is_real(match[0]):
                return match[0]
            counts[pattern.name] += 1
            return f"[{pattern.name}]"

        text = pattern.regex.sub(replace, text)
    return text


def _mask_escaped(text: str, patterns: list[Pattern], counts: Counter[str]) -> str:
    """Each pattern looks at the text as it is, and as it reads without its JSON escapes."""
    views = _views(text)
    for pattern in patterns:
        spans = []
        for depth, view in enumerate([text, *[view.text for view in views]]):
            for match in pattern.regex.finditer(view):
                if match[0] and pattern.is_real(match[0]):
                    start, stop = match.span()
                    for outer in reversed(views[:depth]):
                        start, stop = outer.place(start), outer.place(stop)
                    spans.append((start, stop))
        if spans:
            text = _replace_spans(text, spans, pattern, counts)
            views = _views(text)
    return text


def _replace_spans(text: str, spans: list[tuple[int, int]], pattern: Pattern, counts: Counter[str]) -> str:
    """Spans may overlap: the same words are found in several views."""
    pieces, end = [], 0
    for start, stop in sorted(spans):
        if start >= end:
            pieces += [text[end:start], f"[{pattern.name}]"]
            counts[pattern.name] += 1
        end = max(end, stop)
    return "".join([*pieces, text[end:]])


def _views(text: str) -> list[_Unescaped]:
    """The text without escapes, that without its escapes, and so on."""
    views: list[_Unescaped] = []
    while "\\" in text and len(views) < MAX_ESCAPES:
        view = _Unescaped(text)
        if not view.has_escapes:
            break
        views.append(view)
        text = view.text
    return views


class _Unescaped:
    """A text without its JSON escapes, and where each of its letters stands in the original."""

    def __init__(self, text: str) -> None:
        pieces: list[str] = []
        self._views = [0]  # offsets in the new text where something begins, and the same in the original
        self._places = [0]
        size = end = 0
        for match in _ESCAPE.finditer(text):
            literal = text[end : match.start()]
            digits, letter = match.groups()
            pieces += [literal, chr(int(digits, 16)) if digits else _ESCAPED.get(letter, letter)]
            size += len(literal) + 1
            self._views += [size - 1, size]
            self._places += [match.start(), match.end()]
            end = match.end()
        self.has_escapes = end > 0
        self.text = "".join([*pieces, text[end:]])

    def place(self, offset: int) -> int:
        """In the original."""
        index = bisect_right(self._views, offset) - 1
        return self._places[index] + offset - self._views[index]


def _field(rule: str) -> tuple[str | None, str]:
    """`output:email` is a rule for one field; a colon inside a regex is none of ours."""
    field, colon, rest = rule.partition(":")
    if not colon or "=" in field:
        return None, rule
    if field not in MASKED:
        raise ConfigError(f"there is no field {field!r} to mask; there are {', '.join(MASKED)}", param="redact")
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
