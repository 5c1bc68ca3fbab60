"""Sentences of growing texts: the cases that the browser's splitter is held to as well, and what holds for any text."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonle.workers.sentences import MAX_CHARS, SentenceSplitter, sentences_of, speakable

CASES: dict[str, list[str]] = json.loads((Path(__file__).parents[2] / "fakes/sentences.json").read_text())
# Letters that rules are about, so that random texts meet them often.
TEXTS = st.one_of(
    st.text(max_size=600),
    st.text(alphabet='aB1ក្ល។ ๆกข.!?…"*)\n。؟。\u200b', max_size=600),
    st.lists(st.sampled_from(["".join(case) for case in CASES.values()]), max_size=4).map(" ".join),
)


@pytest.mark.parametrize("name", CASES)
def test_sentences_end_where_a_reader_would_end_them(name: str) -> None:
    assert sentences_of("".join(CASES[name])) == CASES[name]


@given(TEXTS, st.lists(st.integers(0, 600), max_size=8))
@settings(max_examples=300, deadline=None)
def test_no_letter_is_lost_and_cuts_between_pieces_change_nothing(text: str, cuts: list[int]) -> None:
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    splitter = SentenceSplitter()
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    found = [sentence for piece in pieces for sentence in splitter.push(piece)] + splitter.end()
    assert "".join(found) == text
    assert found == sentences_of(text)
    assert all(0 < len(sentence) <= MAX_CHARS for sentence in found)


@given(TEXTS)
@settings(max_examples=100, deadline=None)
def test_what_waits_for_its_end_is_bounded(text: str) -> None:
    splitter, num_waiting = SentenceSplitter(), 0
    for letter in text:
        num_waiting += 1 - sum(map(len, splitter.push(letter)))
        assert num_waiting < MAX_CHARS


def test_a_sentence_is_there_when_the_next_one_begins() -> None:
    splitter = SentenceSplitter()
    assert splitter.push("It rains.") == []  # 3.14 would go on
    assert splitter.push(" ") == []
    assert splitter.push("T") == ["It rains. "]
    assert splitter.push("ru\n") == ["Tru\n"]
    assert splitter.push("ភ្លៀង។") == []
    assert splitter.push(" ") == ["ភ្លៀង។"]


def test_a_text_without_ends_is_cut_between_words_or_letters() -> None:
    words = "word " * 100
    assert all(sentence.endswith(" ") for sentence in sentences_of(words))
    khmer = "ស្ត្រី" * 60  # each is one letter with marks below and above
    assert all(sentence.startswith("ស") for sentence in sentences_of(khmer))


def test_marks_of_markdown_are_not_spoken() -> None:
    texts = [
        "**Bold.** ",
        "## A `title`\n",
        "- one\n",
        "* two",
        "---\n",
        "\n",
        "3 * 4 in C# and snake_case",
        "_so_",
        " ភ្នំពេញ។",
    ]
    said = ["Bold.", "A title", "one", "two", "", "", "3 * 4 in C# and snake_case", "so", "ភ្នំពេញ។"]
    assert [speakable(text) for text in texts] == said
