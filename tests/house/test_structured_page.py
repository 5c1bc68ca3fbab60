"""The page about structured output names the limits that hold, and only forms that there are."""

from __future__ import annotations

import re
from pathlib import Path

from tonle.engine.grammar import json_schema, limits
from tonle.engine.grammar.structural_tag import _Tags
from tonle.engine.request import StructuredOutput

PAGE = (Path(__file__).parents[2] / "docs" / "structured.md").read_text(encoding="utf-8")


def test_the_limits_are_those_of_the_code() -> None:
    table = PAGE.split("| limit | value |")[1].split("\n\n")[0]
    listed = [int(number.replace(",", "")) for number in re.findall(r"\| ([\d,]+) \|", table)]
    names = ("BYTES", "GBNF_BYTES", "DEPTH", "PROPERTIES", "PATTERN_PROPERTIES", "PATTERNS_AT_ONCE", "MULTIPLE_OF", "CHOICES",
             "REGEX_CHARS", "RULES", "FORCED_TOKENS")  # fmt: skip
    assert listed == [getattr(limits, f"MAX_{name}") for name in names]


def test_every_form_and_keyword_is_named() -> None:
    assert [name for name in StructuredOutput.__struct_fields__ if f"`{name}=" not in PAGE] == []
    refused = [
        name
        for name in json_schema._UNSUPPORTED
        if not name.startswith(("min", "max", "then", "else", "depend", "$rec"))
    ]
    assert [name for name in refused if f"`{name}`" not in PAGE] == []
    assert [name for name in json_schema._FORMATS - {"unknown"} if f"`{name}`" not in PAGE] == []
    assert [name for name in _Tags({})._formats if f"`{name}`" not in PAGE] == []
