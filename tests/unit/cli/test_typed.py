"""Messages of one line and of several."""

from __future__ import annotations

import pytest

from tonle.cli.typed import from_pipe, is_open, message_of


@pytest.mark.parametrize(
    ("lines", "messages"),
    [
        (["one\n", "\n", "two\n"], ["one", "", "two"]),
        (["one \\\n", "two\n", "three"], ["one \ntwo", "three"]),
        (['"""one\n', "\n", "two \\\n", 'three"""\n', "four\n"], ["one\n\ntwo \\\nthree", "four"]),
        (['"""one line"""\n'], ["one line"]),
        (['say "hello"\n'], ['say "hello"']),
        (['"""never closed\n', "more\n"], ["never closed\nmore"]),
        (["the last line \\"], ["the last line"]),
    ],
)
def test_a_pipe(lines: list[str], messages: list[str]) -> None:
    assert [message_of(text) for text in from_pipe(iter(lines))] == messages


def test_what_goes_on() -> None:
    assert is_open("a\\") and is_open('"""') and is_open('  """a\nb')
    assert not is_open("a") and not is_open('"""a"""') and not is_open('"""a\\"""')
