"""How much a caller may ask of a grammar. Each bound stands here, with its reason.

Does: constants, and checks that cost no more than reading the text once. Does not: know schemas or llguidance.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

from tonle.errors import InvalidRequest

PARAM = "structured"  # the field of `GenerationConfig` that every refusal names

MAX_BYTES = (
    256 * 1024
)  # of a schema or grammar: the tools of a large agent take about 150 KiB; twice that compiles in a second
MAX_GBNF_BYTES = 64 * 1024  # rewritten in Python, where requests come in
MAX_DEPTH = 100  # brackets inside brackets; llguidance's own reader of JSON stops at 128
MAX_PROPERTIES = (
    400  # of one object: where all are optional, each place has as many ways to go on, and llguidance stops at 2,000
)
MAX_PATTERN_PROPERTIES = 100  # of a whole schema: each is compared with each, which takes 0.1 s; of 400, minutes
MAX_PATTERNS_AT_ONCE = 8  # that one string must match: twice as many take 1,000 times as long
MAX_MULTIPLE_OF = 100_000  # one state for each remainder: 0.3 s
MAX_CHOICES = 10_000
MAX_REGEX_CHARS = 16 * 1024
MAX_RULES = (
    400  # of a grammar: to tell of a mistake behind a chain of n rules, llguidance takes n² steps; here a second
)
MAX_FORCED_TOKENS = (
    4_096  # that the beginning of a grammar leaves no choice about: beyond it, it is taken to be endless
)

_STRINGS = re.compile(
    r'"(?:[^"\\]|\\.?)*+(?:"|\Z)', re.DOTALL
)  # the last one may lack its end: one pass, whatever the text
_BRACKETS = re.compile(r"[\[\](){}]")


def refuse(message: str) -> NoReturn:
    raise InvalidRequest(message, param=PARAM)


def check_bytes(what: str, num_bytes: int) -> None:
    if num_bytes > MAX_BYTES:
        refuse(f"{what} has {num_bytes} bytes; at most {MAX_BYTES} are taken")


def check_text_depth(what: str, text: str) -> None:
    """Of brackets outside of quoted strings."""
    depth = 0
    for bracket in _BRACKETS.findall(_STRINGS.sub("", text)):
        depth += 1 if bracket in "[({" else -1
        if depth > MAX_DEPTH:
            refuse(
                f"{what} has more than {MAX_DEPTH} levels of brackets inside each other; at most {MAX_DEPTH} are taken"
            )


def check_value_depth(what: str, value: Any) -> None:
    """Of lists and objects inside each other. Does not recurse: a hostile value may have any depth."""
    level, depth = [value], 0
    while level := [child for item in level for child in _children(item)]:
        depth += 1
        if depth > MAX_DEPTH:
            refuse(f"{what} has more than {MAX_DEPTH} levels inside each other; at most {MAX_DEPTH} are taken")


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [child for child in value.values() if isinstance(child, dict | list | tuple)]
    if isinstance(value, list | tuple):
        return [child for child in value if isinstance(child, dict | list | tuple)]
    return []
