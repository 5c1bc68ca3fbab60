"""Pieces of Lark, as llguidance reads it: strings and regular expressions."""

from __future__ import annotations

import json
import re

from tonle.engine.grammar.limits import MAX_REGEX_CHARS, check_text_depth, refuse


def lark_string(text: str) -> str:
    """A string literal, which is written as one of JSON."""
    return json.dumps(text, ensure_ascii=False)


def regex_literal(pattern: object) -> str:
    """`/…/`. The whole text must match, so that anchors at the ends of the pattern say nothing. Raises `InvalidRequest`."""
    if not isinstance(pattern, str):
        refuse(f"a regex must be a string, not {type(pattern).__name__}")
    if len(pattern) > MAX_REGEX_CHARS:
        refuse(f"the regex has {len(pattern)} characters; at most {MAX_REGEX_CHARS} are taken")
    check_text_depth("the regex", pattern)
    pattern = pattern.removeprefix("^")
    before = pattern.removesuffix("$")
    if (len(before) - len(before.rstrip("\\"))) % 2 == 0:  # else it is a dollar sign
        pattern = before
    if not pattern:
        return '""'
    return "/" + re.sub(r"\\.|/|\n", _escaped, pattern, flags=re.DOTALL) + "/"


def _escaped(found: re.Match[str]) -> str:
    text = found[0]
    if text == "/":
        return r"\/"
    if text in ("\n", "\\\n"):
        return r"\n"
    return "[0-9]" if text == r"\d" else text  # digits of other scripts would surprise a program that reads the answer
