"""How values are written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonle.config import values


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
    assert values.size().read(text) == num_bytes


@given(st.integers(1, 10**15))
def test_a_shown_size_reads_back_as_itself(num_bytes: int) -> None:
    assert values.size().read(values.show_size(num_bytes)) == num_bytes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30.0),
        (2.5, 2.5),
        (0, 0.0),
        ("500ms", 0.5),
        ("2 m", 120.0),
        ("1h", 3600.0),
        ("6m30s", 390.0),
        ("1h 2m 3.5s", 3723.5),
        ("1s500ms", 1.5),
    ],
)
def test_durations(text: object, seconds: float) -> None:
    assert values.duration().read(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "number"),
    [("4096", 4096), (4096, 4096), ("32k", 32_000), ("32K", 32_768), ("25.6k", 25_600), ("0.5K", 512), ("1M", 1024**2)],
)
def test_tokens_are_written_as_vllm_writes_them(text: object, number: int) -> None:
    assert values.tokens(0).read(text) == number


@pytest.mark.parametrize(("text", "number"), [("0.9", 0.9), (0.5, 0.5), (1, 1.0), ("90%", 0.9), (".25", 0.25)])
def test_shares(text: object, number: float) -> None:
    assert values.fraction().read(text) == pytest.approx(number)


@pytest.mark.parametrize(("text", "number"), [("4", 4.0), (0.5, 0.5), ("12.5", 12.5), (1000, 1000.0)])
def test_numbers(text: object, number: float) -> None:
    assert values.number().read(text) == number
    assert values.number().read(values.number().show(number)) == number


@pytest.mark.parametrize("word", [True, "true", "YES", "on", "1", 1])
def test_switch_on(word: object) -> None:
    assert values.boolean().read(word) is True


@pytest.mark.parametrize("word", [False, "false", "No", "off", "0", 0])
def test_switch_off(word: object) -> None:
    assert values.boolean().read(word) is False


def test_names_come_as_text_or_lists() -> None:
    assert values.names().read("a, b") == values.names().read(["a", "b"]) == ("a", "b")


def test_optional_reads_none_as_null_or_word() -> None:
    kind = values.optional(values.integer(1), none="nothing")
    assert kind.read(None) is None
    assert kind.read("None") is None
    assert kind.read("3") == 3
    assert kind.show(None) == "nothing"


def test_optional_may_have_other_words_for_nothing() -> None:
    length = values.optional(values.tokens(2), none="all", also=("auto", "-1"))
    assert length.read("auto") is length.read(-1) is length.read("none") is None and length.read("16") == 16


def test_choice_may_have_other_words() -> None:
    dtype = values.choice("float16", also={"half": "float16"})
    assert dtype.read("Half") == dtype.read("float16") == "float16"
    with pytest.raises(ValueError, match="must be one of float16, not 'double'"):
        dtype.read("double")


def test_a_secret_is_not_shown() -> None:
    secret = values.optional(values.secret(), none="")
    assert secret.read("hush") == "hush" and secret.show("hush") == ""
    with pytest.raises(ValueError, match="must be text") as refused:
        secret.read(1234)
    assert "1234" not in str(refused.value)


def test_choice_ignores_case() -> None:
    assert values.choice("INFO", "DEBUG").read("debug") == "DEBUG"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (values.integer(0, 10), "11"),
        (values.integer(0, 10), -1),
        (values.integer(0), "3.5"),
        (values.integer(0), 3.0),
        (values.integer(0), True),
        (values.integer(0), "１２"),
        (values.integer(0), None),
        (values.tokens(0), "1.5"),
        (values.tokens(0), "1.0001K"),
        (values.tokens(0), "k"),
        (values.tokens(0), "-1"),
        (values.tokens(0), "３k"),
        (values.tokens(2), "1"),
        (values.tokens(0), True),
        (values.size(), "2GX"),
        (values.size(), "-1"),
        (values.size(), 0),
        (values.size(), 1.5),
        (values.number(), 0),
        (values.number(), "-1"),
        (values.number(), "50%"),
        (values.number(), True),
        (values.number(), float("nan")),
        (values.number(), float("inf")),
        (values.fraction(), "0"),
        (values.fraction(), 1.1),
        (values.fraction(), "101%"),
        (values.fraction(), float("nan")),
        (values.fraction(), True),
        (values.duration(), "-1s"),
        (values.duration(), float("nan")),
        (values.duration(), "soon"),
        (values.duration(), "30s2m"),
        (values.duration(), "1m1m"),
        (values.duration(), "1m30"),
        (values.duration(), ""),
        (values.duration(), True),
        (values.boolean(), "maybe"),
        (values.boolean(), 2),
        (values.text(), ""),
        (values.text(), 3),
        (values.choice("a", "b"), "c"),
        (values.choice("a", "b"), 1),
        (values.pattern("cpu|cuda", "cpu or cuda"), "tpu"),
        (values.names(), ["a", 1]),
        (values.names(), "a,,b"),
    ],
)
def test_wrong_values_say_what_is_wanted(kind: values.ValueType, value: object) -> None:
    with pytest.raises(ValueError, match=r"^must be "):
        kind.read(value)


def test_objects_come_as_json_or_mappings() -> None:
    kind = values.json_object()
    assert kind.read('{"a": 1}') == kind.read({"a": 1}) == {"a": 1}
    for wrong in ("{", "[1]", "a", 5, ["a"], {1: 2}):
        with pytest.raises(ValueError, match="must be a JSON object such as"):
            kind.read(wrong)
