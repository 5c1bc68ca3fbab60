"""Streams of text: any grouping of any tokens gives the same text, and no delta ends inside a letter."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from tests.unit.engine.text.corpus import CORPUS, SENTENCES, mixtures
from tests.unit.engine.text.letters import cuts_letter
from tests.unit.engine.text.tokenizers_for_tests import EOS, PlainTokenizer, byte_level_tokenizer
from tonle.engine.text import Text, TextStream, load_text
from tonle.models.source import ModelSource


@pytest.fixture(scope="module")
def byte_text() -> Text:
    return Text.from_live(byte_level_tokenizer())


@pytest.fixture(scope="module")
def model_text(default_model: ModelSource) -> Text:
    return load_text(default_model)


def grouped(tokens: Sequence[int], draw: random.Random) -> Iterator[list[int]]:
    at = 0
    while at < len(tokens):
        size = draw.choice((1, 1, 1, 2, 3, 7))
        yield list(tokens[at : at + size])
        at += size


def deltas(stream: TextStream, groups: Iterator[list[int]]) -> list[str]:
    return [*(stream.push(group) for group in groups), stream.finish()]


def check_deltas(text: str, parts: list[str]) -> None:
    assert "".join(parts) == text
    place = 0
    for part in parts:
        place += len(part)
        assert not cuts_letter(text, place), (text[:place], text[place:])


@pytest.mark.parametrize("script", CORPUS)
def test_a_byte_at_a_time(script: str, byte_text: Text) -> None:
    for sentence in CORPUS[script]:
        check_deltas(sentence, deltas(byte_text.stream(), ([byte] for byte in sentence.encode())))


def test_random_groups_of_bytes(byte_text: Text) -> None:
    draw = random.Random(1)
    for text in mixtures(seed=2, count=600):
        check_deltas(text, deltas(byte_text.stream(), grouped(text.encode(), draw)))


@pytest.mark.model
def test_random_groups_of_the_default_models_tokens(model_text: Text) -> None:
    draw = random.Random(3)
    for text in mixtures(seed=4, count=600):
        tokens = model_text.encode(text)
        assert model_text.decode(tokens) == text
        check_deltas(text, deltas(model_text.stream(), grouped(tokens, draw)))


def test_at_most_one_letter_waits(byte_text: Text) -> None:
    from tonle.engine.text.graphemes import clusters

    for text in mixtures(seed=5, count=50):
        stream, shown, data = byte_text.stream(), "", b""
        for byte in text.encode():
            data += bytes([byte])
            shown += stream.push([byte])
            seen = data.decode(errors="ignore")  # without the incomplete character at the end
            assert seen.startswith(shown)
            assert len(clusters(seen[len(shown) :])) <= 1


@pytest.mark.parametrize("seed", range(4))
def test_any_bytes_come_out_as_python_decodes_them(seed: int, byte_text: Text) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        data = bytes(draw.choices(range(256), k=draw.randint(0, 40)))
        parts = deltas(byte_text.stream(), grouped(data, draw))
        assert "".join(parts) == without_open_end(data)


def without_open_end(data: bytes) -> str:
    """`data` as text; an end that further bytes could complete is left out, as is a joiner at the end."""
    for length in (3, 2, 1):
        end = data[-length:]
        is_surrogate = len(end) == 2 and end[0] == 0xED and 0xA0 <= end[1] <= 0xBF  # Python waits for its third byte
        if is_surrogate or (len(end) == length and completes(end)):
            data = data[:-length]
            break
    return data.decode(errors="replace").rstrip("\u17d2\u1039")


def completes(start: bytes) -> bool:
    """Whether `start` is the beginning of one character: some continuation bytes make it whole."""
    for more in (b"\x80", b"\x80\x80", b"\x80\x80\x80", b"\xbf", b"\xbf\xbf", b"\xbf\xbf\xbf"):
        try:
            if len((start + more).decode()) == 1:
                return True
        except UnicodeDecodeError:
            continue
    return False


def test_wrong_bytes_do_not_hold_the_stream(byte_text: Text) -> None:
    stream = byte_text.stream()
    assert stream.push([0xE1]) == ""
    assert stream.push([0x9E]) == ""  # still may become a Khmer letter
    assert stream.push([0x41]) == "\ufffd"  # it did not; the A waits as any letter does
    assert stream.push([0x42]) == "A"
    assert stream.finish() == "B"


def test_the_end_is_clean(byte_text: Text) -> None:
    def end_of(data: bytes) -> str:
        stream = byte_text.stream()
        return stream.push(list(data)) + stream.finish()

    assert end_of("ខ្មែរ".encode()[:-1]) == "ខ្មែ"  # cut inside a character
    assert end_of("ស្ត្រី".encode()[:-6]) == "ស្ត"  # cut after COENG
    assert end_of("👨‍👩".encode()[:-4]) == "👨"  # cut after ZWJ
    assert end_of("अर्थात्".encode()) == "अर्थात्"  # ends rightly in a virama


def test_special_tokens(byte_text: Text) -> None:
    tokens = [*b"hi", EOS]
    stream = byte_text.stream()
    assert stream.push(tokens) + stream.finish() == "hi"
    stream = byte_text.stream(skip_special_tokens=False)
    assert stream.push(tokens) + stream.finish() == "hi<end>"


# Stop strings


def reference(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first, the longest of those that end there; and which it was."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("seed", range(3))
def test_stop_strings_in_any_grouping(seed: int, byte_text: Text) -> None:
    draw = random.Random(seed)
    for _ in range(300):
        text = "".join(draw.choices(["a", "b", "ab", "\n", " ", "ก", "한", "é", "។"], k=draw.randint(0, 25)))
        stops = ["".join(draw.choices(["a", "b", "\n", " ", "ก", "한", "។"], k=draw.randint(1, 4))) for _ in range(3)]
        before, stop = reference(text, stops)
        stream = byte_text.stream(stop=stops)
        assert "".join(deltas(stream, grouped(text.encode(), draw))) == before, (text, stops)
        assert stream.stopped == stop
        keeping = byte_text.stream(stop=stops, include_stop_text=True)
        assert "".join(deltas(keeping, grouped(text.encode(), draw))) == before + (stop or "")


@pytest.mark.parametrize("seed", range(2))
def test_stop_strings_in_real_text(seed: int, byte_text: Text) -> None:
    draw = random.Random(seed)
    for text in mixtures(seed=seed, count=100):
        starts = [i for i in range(len(text)) if not cuts_letter(text, i)]
        stops = [text[start : start + draw.randint(1, 12)] for start in draw.choices(starts, k=3)]
        before, stop = reference(text, stops)
        stream = byte_text.stream(stop=stops)
        parts = deltas(stream, grouped(text.encode(), draw))
        if not cuts_letter(text, len(before)):
            assert "".join(parts) == before
        assert before.startswith("".join(parts))
        assert stream.stopped == stop


def test_only_what_may_become_a_stop_string_waits(byte_text: Text) -> None:
    stream = byte_text.stream(stop=["\n\nUser:", "END"])
    assert stream.push([*b"It is "]) == "It is"
    assert stream.push([*b"the E"]) == " the "
    assert stream.push([*b"N"]) == ""
    assert stream.push([*b"glish"]) == "ENglis"
    assert stream.push([*b"\n"]) == "h"  # the line end may begin a stop string
    assert stream.push([*b"x"]) == "\n"
    assert stream.push([*b"END of it"]) == "x"
    assert stream.stopped == "END"
    assert stream.push([*b"more"]) == ""
    assert stream.finish() == ""


def test_an_unfinished_stop_string_is_text(byte_text: Text) -> None:
    stream = byte_text.stream(stop=["STOP"])
    assert stream.push([*b"go ST"]) == "go "
    assert stream.finish() == "ST"
    assert stream.stopped is None


def test_a_stop_string_inside_a_letter_leaves_whole_letters(byte_text: Text) -> None:
    for groups in (["ស្រី"], list("ស្រី")):
        stream = byte_text.stream(stop=["រ"])
        parts = [stream.push([*group.encode()]) for group in groups]
        assert "".join(parts) == "ស"  # without the COENG that held on to រ
        assert stream.stopped == "រ"


def test_earliest_end_wins(byte_text: Text) -> None:
    for groups in ([b"xabcd"], [b"xab", b"c", b"d"], [bytes([c]) for c in b"xabcd"]):
        stream = byte_text.stream(stop=["abcd", "bc"])
        assert "".join([*(stream.push([*group]) for group in groups), stream.finish()]) == "xa"
        assert stream.stopped == "bc"


# A tokenizer that only encodes and decodes


def test_plain_tokenizer(byte_text: Text) -> None:
    text = Text.from_live(PlainTokenizer())
    draw = random.Random(7)
    for sentence in SENTENCES:
        tokens = text.encode(sentence)
        assert tokens == list(sentence.encode())
        check_deltas(sentence, deltas(text.stream(), grouped(tokens, draw)))


@pytest.mark.parametrize("seed", range(2))
def test_plain_tokenizer_and_wrong_bytes(seed: int) -> None:
    text = Text.from_live(PlainTokenizer())
    draw = random.Random(seed)
    for _ in range(200):
        data = bytes(draw.choices([*range(0x80, 0x100), 0x41, 0xE1, 0x9E, 0x80], k=draw.randint(0, 30)))
        parts = deltas(text.stream(), grouped(data, draw))
        # It cannot tell a wrong character at the end from an incomplete one, so both are dropped.
        assert "".join(parts).rstrip("\ufffd") == data.decode(errors="replace").rstrip("\ufffd")
