"""Streams of text: any grouping of any tokens gives the same text, and no delta ends inside a letter.

With `hold_clusters="auto"` there is one exception: the first mark after a character that hardly ever has one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence

import pytest

from tests.unit.engine.text.corpus import CORPUS, SENTENCES, mixtures
from tests.unit.engine.text.letters import cuts_letter
from tests.unit.engine.text.tokenizers_for_tests import EOS, PlainTokenizer, byte_level_tokenizer
from tonle.engine.text import Text, TextStream, load_text
from tonle.models.source import ModelSource

both = pytest.mark.parametrize("hold", ["auto", "always"])
SIX_SCRIPTS = ["khmer", "thai", "hindi", "korean", "arabic", "emoji"]
ENGLISH = [
    "The capital of France is Paris. It's 2,000 years old (about 105 km2), isn't it? Yes: #1!",
    "def add(a, b):\n\treturn a + b  # 1 * 2\n\nprint(f'{add(1, 2)}')\n",
    '```json\n{"name": "x", "values": [1, 2.5e-3, null]}\n```\n\n- **bold** and _thin_\n',
]
EUROPEAN = [
    "Zürich – “naïve café”, coöperate… Łódź costs 5 €; ½ × 3 ≠ π → done • §3",
    "Xin chào, bạn có khỏe không? Tôi rất yêu tiếng Việt.",
    "Москва — столица России. Η Αθήνα είναι πρωτεύουσα.",
    "東京は日本の首都です。ガギグゲゴ、北京是中国的首都。",
    "대한민국의 수도는 서울특별시입니다.",
]


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


def check_deltas(text: str, parts: list[str], hold: str) -> None:
    """The parts are the text, cut between letters; with auto, but for the first mark of its kind where none is likely."""
    assert "".join(parts) == text
    cuts = {sum(map(len, parts[:count])) for count in range(len(parts))}
    broken = sorted(place for place in cuts if cuts_letter(text, place))
    if hold == "auto":
        letters, keycaps = first_marks(text)
        broken = [place for place in broken if place not in (letters, keycaps)]
    assert not broken, [(text[:place], text[place:]) for place in broken]


def first_marks(text: str) -> tuple[int | None, int | None]:
    """Where a mark first follows ASCII, kana or an ideograph, and where a keycap's selector first does."""
    unlikely = re.compile(r"(?<=[ -~\u3041-\u30ff\u4e00-\u9fff])[\u0300-\u036f\u3099\u309a\U000e0100-\U000e01ef]")
    found = unlikely.search(text), re.search(r"(?<=[0-9#*])\ufe0f", text)
    letters, keycaps = (match and match.start() for match in found)
    return letters, keycaps


@both
@pytest.mark.parametrize("script", CORPUS)
def test_a_byte_at_a_time(script: str, byte_text: Text, hold: str) -> None:
    for sentence in CORPUS[script]:
        stream = byte_text.stream(hold_clusters=hold)
        check_deltas(sentence, deltas(stream, ([byte] for byte in sentence.encode())), hold)


@pytest.mark.parametrize(
    "script", [*SIX_SCRIPTS, "korean_jamo", "bengali", "tamil", "myanmar", "vietnamese", "japanese"]
)
def test_nothing_breaks_where_marks_are_usual(script: str, byte_text: Text) -> None:
    for sentence in CORPUS[script]:
        if first_marks(sentence) == (None, None):
            stream = byte_text.stream(hold_clusters="auto")
            check_deltas(sentence, deltas(stream, ([byte] for byte in sentence.encode())), "always")


@both
def test_random_groups_of_bytes(byte_text: Text, hold: str) -> None:
    draw = random.Random(1)
    for text in mixtures(seed=2, count=600):
        check_deltas(text, deltas(byte_text.stream(hold_clusters=hold), grouped(text.encode(), draw)), hold)


@both
@pytest.mark.model
def test_random_groups_of_the_default_models_tokens(model_text: Text, hold: str) -> None:
    draw = random.Random(3)
    for text in mixtures(seed=4, count=600):
        tokens = model_text.encode(text)
        assert model_text.decode(tokens) == text
        check_deltas(text, deltas(model_text.stream(hold_clusters=hold), grouped(tokens, draw)), hold)


@pytest.mark.model
def test_english_goes_out_token_by_token(model_text: Text) -> None:
    for text in ENGLISH:
        tokens = model_text.encode(text)
        stream = model_text.stream(model_text.encode("Tell me something."))
        assert [stream.push([token]) for token in tokens] == [model_text.decode([token]) for token in tokens]
        assert stream.finish() == ""


@pytest.mark.model
@pytest.mark.parametrize("text", EUROPEAN)
def test_precomposed_text_goes_out_with_its_last_byte(text: str, model_text: Text) -> None:
    tokens = model_text.encode(text)
    stream, shown = model_text.stream(), ""
    for count, token in enumerate(tokens, 1):
        shown += stream.push([token])
        assert shown == b"".join(map(model_text.token_bytes, tokens[:count])).decode(errors="ignore")


@both
def test_at_most_one_letter_waits(byte_text: Text, hold: str) -> None:
    from tonle.engine.text.graphemes import clusters

    for text in mixtures(seed=5, count=50):
        stream, shown, data = byte_text.stream(hold_clusters=hold), "", b""
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
    assert stream.push([0x41]) == "\ufffdA"  # it did not
    assert stream.push([0xE1]) == stream.push([0x9E]) == ""
    assert stream.finish() == ""
    strict = byte_text.stream(hold_clusters="always")
    assert [strict.push([byte]) for byte in b"\xe1\x9eAB"] == ["", "", "\ufffd", "A"]
    assert strict.finish() == "B"


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


@both
@pytest.mark.parametrize("seed", range(3))
def test_stop_strings_in_any_grouping(seed: int, byte_text: Text, hold: str) -> None:
    draw = random.Random(seed)
    for _ in range(300):
        text = "".join(draw.choices(["a", "b", "ab", "\n", " ", "ก", "한", "é", "។"], k=draw.randint(0, 25)))
        stops = ["".join(draw.choices(["a", "b", "\n", " ", "ก", "한", "។"], k=draw.randint(1, 4))) for _ in range(3)]
        before, stop = reference(text, stops)
        stream = byte_text.stream(stop=stops, hold_clusters=hold)
        assert "".join(deltas(stream, grouped(text.encode(), draw))) == before, (text, stops)
        assert stream.stopped == stop
        keeping = byte_text.stream(stop=stops, include_stop_text=True, hold_clusters=hold)
        assert "".join(deltas(keeping, grouped(text.encode(), draw))) == before + (stop or "")


@both
@pytest.mark.parametrize("seed", range(2))
def test_stop_strings_in_real_text(seed: int, byte_text: Text, hold: str) -> None:
    draw = random.Random(seed)
    for text in mixtures(seed=seed, count=100):
        starts = [i for i in range(len(text)) if not cuts_letter(text, i)]
        stops = [text[start : start + draw.randint(1, 12)] for start in draw.choices(starts, k=3)]
        before, stop = reference(text, stops)
        stream = byte_text.stream(stop=stops, hold_clusters=hold)
        parts = deltas(stream, grouped(text.encode(), draw))
        if not cuts_letter(text, len(before)):
            assert "".join(parts) == before
        assert before.startswith("".join(parts))
        assert stream.stopped == stop


def test_only_what_may_become_a_stop_string_waits(byte_text: Text) -> None:
    stream = byte_text.stream(stop=["\n\nUser:", "END"])
    assert stream.push([*b"It is "]) == "It is "
    assert stream.push([*b"the E"]) == "the "
    assert stream.push([*b"N"]) == ""
    assert stream.push([*b"glish"]) == "ENglish"
    assert stream.push([*b"\n"]) == ""  # the line end may begin a stop string
    assert stream.push([*b"x"]) == "\nx"
    assert stream.push([*b"of the lEN"]) == "of the l"
    assert stream.push([*b"D of it"]) == ""
    assert stream.stopped == "END"
    assert stream.push([*b"more"]) == stream.finish() == ""


def test_what_may_become_a_stop_string_waits_with_the_last_letter(byte_text: Text) -> None:
    stream = byte_text.stream(stop=["\n\nUser:", "END"], hold_clusters="always")
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


@both
def test_plain_tokenizer(hold: str) -> None:
    text = Text.from_live(PlainTokenizer())
    draw = random.Random(7)
    for sentence in SENTENCES:
        tokens = text.encode(sentence)
        assert tokens == list(sentence.encode())
        check_deltas(sentence, deltas(text.stream(hold_clusters=hold), grouped(tokens, draw)), hold)


@pytest.mark.parametrize("seed", range(2))
def test_plain_tokenizer_and_wrong_bytes(seed: int) -> None:
    text = Text.from_live(PlainTokenizer())
    draw = random.Random(seed)
    for _ in range(200):
        data = bytes(draw.choices([*range(0x80, 0x100), 0x41, 0xE1, 0x9E, 0x80], k=draw.randint(0, 30)))
        parts = deltas(text.stream(), grouped(data, draw))
        # It cannot tell a wrong character at the end from an incomplete one, so both are dropped.
        assert "".join(parts).rstrip("\ufffd") == data.decode(errors="replace").rstrip("\ufffd")
