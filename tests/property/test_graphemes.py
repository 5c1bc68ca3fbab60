"""Any text in any pieces: boundaries hold as text grows, and streams lose, add and break nothing."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.text.corpus import SENTENCES
from tests.unit.engine.text.letters import cuts_letter
from tests.unit.engine.text.tokenizers_for_tests import byte_level_tokenizer
from tonle.engine.text import Text
from tonle.engine.text.graphemes import MAX_CLUSTER, clusters, floor, is_boundary, safe_length, trim

TEXT = Text.from_live(byte_level_tokenizer())

# Code points that join, and some they join to: dense in the cases that matter, unlike text drawn from all of Unicode.
TRICKY = (
    "aé1# \n\r\t\u200b\u200c\u200d\ufe0f\u20e3\u0301\u0323"
    "កខរឫ្់៌ិំ" + "मकषिा़्ऋ" + "কযঅা্" + "கஷஸரீ்" + "ක්ර" + "ကင္်ား" + "กำ่า" + "ꦏ꧀" + "\u1a20\u1a60"
    "한\u1112\u1161\u11ab" + "لُّ\u0600" + "ｶﾞ" + "葛\U000e0100" + "👨👩👍\U0001f3fd🏴\U000e0067\U000e007f🇰🇭"
)
TEXTS = st.one_of(
    st.text(st.sampled_from(TRICKY), max_size=30),
    st.text(max_size=30),
    st.lists(st.sampled_from(SENTENCES), max_size=3).map(" ".join),
)
FEW = settings(max_examples=150, deadline=None)
HOLDS = st.sampled_from(["auto", "always"])
KEYCAP_MARKS = "\ufe0e\ufe0f\u20e3"


@FEW
@given(TEXTS)
def test_clusters_part_the_text(text: str) -> None:
    parts = clusters(text)
    assert "".join(parts) == text
    place = 0
    for part in parts:
        assert part
        assert clusters(part) == [part]  # a letter is a letter on its own too
        place += len(part)
        assert is_boundary(text, place)
        assert not cuts_letter(text, place)


@FEW
@given(TEXTS, TEXTS)
def test_nothing_to_come_can_undo_what_is_safe(text: str, more: str) -> None:
    safe = safe_length(text)
    assert safe == len(text) or len(clusters(text[safe:])) == 1
    if len(text) - safe <= MAX_CLUSTER and not _has_endless_cluster(text):
        assert is_boundary(text + more, safe)


@FEW
@given(TEXTS, st.integers(0, 40))
def test_floor_is_the_nearest_boundary(text: str, index: int) -> None:
    boundary = floor(text, index)
    assert boundary <= index
    assert is_boundary(text, boundary)
    assert not any(is_boundary(text, place) for place in range(boundary + 1, min(index, len(text)) + 1))


@FEW
@given(TEXTS, HOLDS, st.data())
def test_streams_say_the_same_in_any_grouping(text: str, hold: str, data: st.DataObject) -> None:
    tokens = list(text.encode())
    cuts = sorted(data.draw(st.sets(st.integers(0, len(tokens)), max_size=20)) | {0, len(tokens)})
    stream, shown, broken = TEXT.stream(hold_clusters=hold), "", set[int]()
    for start, end in pairwise(cuts):
        shown += stream.push(tokens[start:end])
        if not is_boundary(text, len(shown)):
            broken.add(len(shown))
    assert text.startswith(shown)
    assert stream.finish() == trim(text[len(shown) :])
    if not _has_endless_cluster(text):
        keycaps = [place for place in broken if text[place] in KEYCAP_MARKS]
        assert len(keycaps) <= (hold == "auto")  # the first of each kind, and none after it
        assert len(broken) - len(keycaps) <= (hold == "auto")


@FEW
@given(TEXTS, st.data())
def test_a_prompt_with_marks_leaves_nothing_to_learn(text: str, data: st.DataObject) -> None:
    tokens = list(text.encode())
    cuts = sorted(data.draw(st.sets(st.integers(0, len(tokens)), max_size=20)) | {0, len(tokens)})
    taught, strict = TEXT.stream(list("e\u0301".encode())), TEXT.stream(hold_clusters="always")
    for start, end in pairwise(cuts):
        assert taught.push(tokens[start:end]) == strict.push(tokens[start:end])
    assert taught.finish() == strict.finish()


@FEW
@given(st.lists(st.text(st.characters(max_codepoint=127, exclude_characters="\r"), min_size=1), max_size=10))
def test_ascii_is_never_held(pieces: list[str]) -> None:
    stream = TEXT.stream()
    assert [stream.push(list(piece.encode())) for piece in pieces] == pieces
    assert stream.finish() == ""


@FEW
@given(TEXTS, st.lists(st.text(st.sampled_from(TRICKY), min_size=1, max_size=3), max_size=3), HOLDS, st.data())
def test_stops_are_found_in_any_grouping(text: str, stops: list[str], hold: str, data: st.DataObject) -> None:
    tokens = list(text.encode())
    whole = TEXT.stream(stop=stops, hold_clusters="always")
    expected = whole.push(tokens) + whole.finish()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(tokens)), max_size=20)) | {0, len(tokens)})
    parted = TEXT.stream(stop=stops, hold_clusters=hold)
    shown = "".join(parted.push(tokens[start:end]) for start, end in pairwise(cuts))
    assert shown + parted.finish() == expected
    assert parted.stopped == whole.stopped
    assert text.startswith(expected)
    assert not any(stop in expected for stop in stops)


def _has_endless_cluster(text: str) -> bool:
    return any(len(cluster) > MAX_CLUSTER for cluster in clusters(text))
