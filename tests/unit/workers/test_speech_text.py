"""Text to be spoken: sentences, runs of one script, and how Khmer sounds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonle.workers.kinds.khmer_sounds import khmer_sounds
from tonle.workers.kinds.speech_text import runs, sentences
from tonle.workers.sentences import MAX_CHARS

# "ស" with the vowel sign follows "។" without a space.
MIXED = "ក ខ្មែរ។ 。.!?\n ab3.5 'x\") ៗ១២ \u200b日本ですпривет"


def test_sentences_end_where_they_do() -> None:
    text = 'He paid 3.50 dollars. "Really?" she asked! Yes...\nសួស្តី។ខ្ញុំជាកូនខ្មែរ។ end'
    assert sentences(text) == [
        "He paid 3.50 dollars.", '"Really?" she asked!', "Yes...", "សួស្តី។", "ខ្ញុំជាកូនខ្មែរ។", "end",
    ]  # fmt: skip
    assert sentences(" \n ") == []


@given(st.text(st.sampled_from(MIXED), max_size=2000))
@settings(max_examples=100, deadline=None)
def test_nothing_is_lost_and_no_piece_is_long(text: str) -> None:
    pieces = sentences(text)
    assert all(0 < len(piece) <= MAX_CHARS for piece in pieces)
    assert "".join("".join(pieces).split()) == "".join(text.split())
    for piece in pieces:
        assert "".join(part for _, part in runs(piece, "en-us")) == piece
        khmer_sounds(piece)


def test_each_script_has_its_language() -> None:
    assert runs("Hello សួស្តី, world 3", "en-us") == [("en-us", "Hello "), ("km", "សួស្តី, "), ("en-us", "world 3")]
    assert runs("123", "fr") == [("fr", "123")]
    assert runs("日本です", "en") == [("ja", "日本"), ("ja", "です")]
    assert [language for language, _ in runs("中文 ไทย русский हिन्दी ελληνικά", "en")] == [
        "cmn",
        "th",
        "ru",
        "hi",
        "el",
    ]


@pytest.mark.parametrize(
    ("text", "sounds"),
    [
        ("សួស្តី", "su@'st@I"),  # hello
        ("អរគុណ", "?O:'kun"),  # thank you
        ("ភាសាខ្មែរ", "phi@sa:'khmaE"),  # the Khmer language
        ("ភ្នំពេញ", "phnum'pe:n^"),
        ("ទន្លេសាប", "to:nle:'sa:p"),
        ("កា គា", "'ka: 'ki@"),  # one vowel sign, two series
        ("កាត់", "'kat"),  # made short
        ("ប៉ា", "'pa:"),  # a shifter
        ("ប្រាំ", "'pRam"),
        ("ផ្ទះ", "'phte@h"),
        ("១២ 305", "d@p pi: b@I Ro:j pRam"),
        ("២០២៤", "pi: po@n m@pheI bu@n"),
        ("00", "so:n so:n"),
        ("abc", ""),
    ],
)
def test_khmer_sounds_as_it_is_written(text: str, sounds: str) -> None:
    assert khmer_sounds(text) == sounds
