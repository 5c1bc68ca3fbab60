"""A benchmark that lacks a tool says so in one line."""

from __future__ import annotations

import pytest
from benchmarks.needs import development_tool


def test_a_tool_that_is_there() -> None:
    assert development_tool("json").loads("1") == 1


def test_a_tool_that_is_missing() -> None:
    with pytest.raises(SystemExit, match=r"needs no_such_tool.*pip install -e '\.\[dev\]'"):
        development_tool("no_such_tool")
