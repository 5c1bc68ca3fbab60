"""Where a text has been seen before, against a search of the whole text."""

from __future__ import annotations

import random
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from tonle.engine.speculate.text_index import MAX_MATCH, RUN, TextIndex


def longest_by_search(text: list[int]) -> int:
    """The length of the longest end of `text` that occurs before its end, up to MAX_MATCH."""
    best = 0
    for place in range(1, len(text)):
        length = 0
        while length < min(place, MAX_MATCH) and text[place - 1 - length] == text[-1 - length]:
            length += 1
        best = max(best, length)
    return best


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 7))
def test_the_longest_end_is_found(text: list[int], cut: int) -> None:
    index = TextIndex()
    for at in range(0, len(text), cut):  # however it grows
        index.extend(text[at : at + cut])
    match, longest = index.find(text), longest_by_search(text)
    assert (match is None) == (longest < RUN)
    if match is not None:
        assert match.length <= longest
        for place in match.places:
            assert text[place - match.length : place] == text[-match.length :]
            assert place < len(text)


def test_of_several_places_the_most_frequent_continuation_is_guessed() -> None:
    index, run = TextIndex(), [1, 2, 3, 4]
    index.extend([*run, 5, 6, *run, 7, 8, *run, 5, 9, *run])
    match = index.find(index.tokens)
    assert match is not None and match.length == 4 and len(match.places) == 3
    guesses = list(match.continuation())
    assert guesses[0] == (5, 2 / 3)
    assert guesses[1][0] == 9 and guesses[1][1] == 0.5  # of two, the latest


def test_texts_are_kept_apart() -> None:
    index = TextIndex()
    index.extend([1, 2, 3])
    index.end_text()
    index.extend([4, 5, 6])
    index.end_text()
    assert index.find([1, 2, 3]) is None and index.find([2, 3, 4]) is None  # nothing followed; that is two texts
    index.extend([9, 1, 2, 3, 8])
    match = index.find([7, 1, 2, 3])
    assert match is not None and [token for token, _ in match.continuation()] == [8]


def test_a_text_of_one_token_over_and_over_takes_no_longer() -> None:
    """Each of its places has the same run: only the latest are compared."""
    index, text = TextIndex(), [7] * 20_000
    index.extend(text)
    calls = 0
    began = time.process_time()
    while time.process_time() - began < 0.05:
        match = index.find(text)
        calls += 1
    assert match is not None and match.length == MAX_MATCH
    assert len(match.places) <= 8 and calls > 10


def test_random_text_is_found_where_it_was_copied() -> None:
    rng = random.Random(1)
    text = [rng.randrange(50_000) for _ in range(500)]
    index = TextIndex()
    index.extend(text + text[100:120])
    match = index.find(index.tokens)
    assert match is not None and match.length == 20
    assert [token for token, _ in match.continuation()][:380] == text[120:500]
