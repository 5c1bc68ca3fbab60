"""How values are written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonle.config import kinds


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1024", 1024),
        (4096, 4096),
        ("2GiB", 2 * 1024**3),
        ("2G", 2 * 1024**3),
        ("2gib", 2 * 1024**3),
        ("512MB", 512 * 10**6),
        ("1.5 GiB", 3 * 1024**3 // 2),
        ("3kB", 3000),
        ("7B", 7),
        ("1TiB", 1024**4),
    ],
)
def test_sizes(text: object, num_bytes: int) -> None:
    assert kinds.size().read(text) == num_bytes


@given(st.integers(1, 10**15))
def test_a_shown_size_reads_back_as_itself(num_bytes: int) -> None:
    assert kinds.size().read(kinds.show_size(num_bytes)) == num_bytes


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30.0), (2.5, 2.5), (0, 0.0), ("500ms", 0.5), ("2 m", 120.0), ("1h", 3600.0)]
)
def test_durations(text: object, seconds: float) -> None:
    assert kinds.duration().read(text) == pytest.approx(seconds)


@pytest.mark.parametrize(("text", "number"), [("0.9", 0.9), (0.5, 0.5), (1, 1.0), ("90%", 0.9), (".25", 0.25)])
def test_shares(text: object, number: float) -> None:
    assert kinds.share().read(text) == pytest.approx(number)


@pytest.mark.parametrize("word", [True, "true", "YES", "on", "1", 1])
def test_switch_on(word: object) -> None:
    assert kinds.switch().read(word) is True


@pytest.mark.parametrize("word", [False, "false", "No", "off", "0", 0])
def test_switch_off(word: object) -> None:
    assert kinds.switch().read(word) is False


def test_names_come_as_text_or_lists() -> None:
    assert kinds.names().read("a, b") == kinds.names().read(["a", "b"]) == ("a", "b")


def test_optional_reads_none_as_null_or_word() -> None:
    kind = kinds.optional(kinds.whole(1), none="nothing")
    assert kind.read(None) is None
    assert kind.read("None") is None
    assert kind.read("3") == 3
    assert kind.show(None) == "nothing"


def test_choice_ignores_case() -> None:
    assert kinds.choice("INFO", "DEBUG").read("debug") == "DEBUG"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (kinds.whole(0, 10), "11"),
        (kinds.whole(0, 10), -1),
        (kinds.whole(0), "3.5"),
        (kinds.whole(0), 3.0),
        (kinds.whole(0), True),
        (kinds.whole(0), "１２"),
        (kinds.whole(0), None),
        (kinds.size(), "2GX"),
        (kinds.size(), "-1"),
        (kinds.size(), 0),
        (kinds.size(), 1.5),
        (kinds.share(), "0"),
        (kinds.share(), 1.1),
        (kinds.share(), "101%"),
        (kinds.share(), float("nan")),
        (kinds.share(), True),
        (kinds.duration(), "-1s"),
        (kinds.duration(), float("nan")),
        (kinds.duration(), "soon"),
        (kinds.duration(), True),
        (kinds.switch(), "maybe"),
        (kinds.switch(), 2),
        (kinds.text(), ""),
        (kinds.text(), 3),
        (kinds.choice("a", "b"), "c"),
        (kinds.choice("a", "b"), 1),
        (kinds.pattern("cpu|cuda", "cpu or cuda"), "tpu"),
        (kinds.names(), ["a", 1]),
        (kinds.names(), "a,,b"),
    ],
)
def test_wrong_values_say_what_is_wanted(kind: kinds.Kind, value: object) -> None:
    with pytest.raises(ValueError, match=r"^must be "):
        kind.read(value)


def test_objects_come_as_json_or_mappings() -> None:
    kind = kinds.json_object()
    assert kind.read('{"a": 1}') == kind.read({"a": 1}) == {"a": 1}
    for wrong in ("{", "[1]", "a", 5, ["a"], {1: 2}):
        with pytest.raises(ValueError, match="must be a JSON object such as"):
            kind.read(wrong)
