"""Wrapping an answer at words, seen on a small terminal."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wcwidth import wcswidth

from tonle.cli.wrap import WordWrapper
from tonle.engine.text.graphemes import clusters


class Screen:
    """Obeys what a wrapper may send: text, newline, carriage return, erase to the end of the line."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.lines = [""]
        self._start = False  # after a carriage return: the next text replaces the line

    def write(self, text: str) -> None:
        while text:
            if text.startswith("\x1b[K"):
                text = text[3:]
                self._start = False
                continue
            char, text = text[0], text[1:]
            if char == "\n":
                assert not self._start, "a line is rewritten before it is left"
                self.lines.append("")
            elif char == "\r":
                self.lines[-1], self._start = "", True
            else:
                self.lines[-1] += char
            assert wcswidth(self.lines[-1].replace("\t", "        ")) < self.columns or "\t" in self.lines[-1]


def wrapped(pieces: list[str], columns: int) -> list[str]:
    screen = Screen(columns)
    wrapper = WordWrapper(screen.write, lambda: columns)
    for piece in pieces:
        wrapper.feed(piece)
    wrapper.finish()
    return screen.lines


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("the quick brown fox", ["the quick ", "brown fox"]),
        ("one two\n\n  three", ["one two", "", "  three"]),
        ("a abcdefghijklmnop z", ["a ", "abcdefghij", "klmnop z"]),
        ("    abcdefghij", ["    abcdef", "ghij"]),
        ("你好世界你好世界。好", ["你好世界你", "好世界。好"]),
        ("日本語語（日本）", ["日本語語", "（日本）"]),
        ("สวัสดีครับผมชื่อ", ["สวัสดีครับผมชื่", "อ"]),  # between clusters: word by word needs a dictionary
        ("👩‍👩‍👧 👩‍👩‍👧 👩‍👩‍👧 👩‍👩‍👧", ["👩‍👩‍👧 👩‍👩‍👧 👩‍👩‍👧 ", "👩‍👩‍👧"]),
        ("cafe\u0301s cafe\u0301s", ["cafe\u0301s ", "cafe\u0301s"]),
        ("abcdefghij klm", ["abcdefghij", "klm"]),  # the space would be in the column that stays empty
    ],
)
def test_lines_end_at_words_however_the_text_arrives(text: str, lines: list[str], size: int) -> None:
    assert wrapped([text[at : at + size] for at in range(0, len(text), size)], 11) == lines


def test_a_word_is_shown_before_it_is_complete() -> None:
    screen = Screen(20)
    wrapper = WordWrapper(screen.write, lambda: 20)
    wrapper.feed("hel")
    assert screen.lines == ["hel"]


def test_a_resized_window_counts_from_the_next_piece() -> None:
    screen = Screen(40)
    wrapper = WordWrapper(screen.write, lambda: screen.columns)
    wrapper.feed("one two ")
    screen.columns = 12
    wrapper.feed("three four five")
    assert screen.lines == ["one two ", "three four ", "five"]


LETTERS = ["a", "b", " ", ",", "e\u0301", "ខ្មែ", "រ", "世", "。", "（", "ท", "👩\u200d👧", "-", "é", "\u00a0", "\n"]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(LETTERS), max_size=60).map("".join), st.integers(5, 30), st.integers(1, 7))
def test_nothing_but_spaces_is_lost_and_no_cluster_is_cut(text: str, columns: int, size: int) -> None:
    lines = wrapped([text[at : at + size] for at in range(0, len(text), size)], columns)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "").replace("\n", "")
    assert [each for line in lines for each in clusters(line) if each != " "] == [
        each for each in clusters(text) if each not in (" ", "\n")
    ]
