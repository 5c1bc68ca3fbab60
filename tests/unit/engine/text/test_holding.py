"""Where the last letter of a stream waits, and what teaches a stream to hold more."""

from __future__ import annotations

import pytest

from tests.unit.engine.text.corpus import CORPUS, decomposed
from tests.unit.engine.text.tokenizers_for_tests import byte_level_tokenizer
from tonle.engine.text import Text
from tonle.engine.text.holding import Holding
from tonle.errors import ConfigError

TEXT = Text.from_live(byte_level_tokenizer())


def safe(text: str, hold: str = "auto", prompt: str = "") -> str:
    return text[: Holding(hold, prompt=prompt).safe_length(text, len(text))]


def parts(text: str, *, prompt: str = "", hold: str = "auto") -> list[str]:
    """What a stream gives for each code point."""
    stream = TEXT.stream(list(prompt.encode()), hold_clusters=hold)
    return [stream.push(list(char.encode())) for char in text] + [stream.finish()]


@pytest.mark.parametrize(
    "text",
    ["a", "Z", "7", "#", " ", ".", "~", "\n", "\t", "\x7f", "é", "ß", "Ł", "ǆ", "ế", "ω", "ά", "й", "ж", "ա", "ა", "国",
     "𠮷", "あ", "ガ", "ー", "ㄅ", "한", "—", "“", "…", "•", "€", "→", "≠", "½", "×", "°", "§", "\u00a0", "。", "，", "！", "Ａ",
     "\ufffd", "─"],
)  # fmt: skip
def test_nothing_waits_after(text: str) -> None:
    assert safe(text) == text
    assert safe("ខ្មែរ" + text) == "ខ្មែរ" + text
    assert safe(text, "always") == ("" if text not in "\n\t\x7f" else text)


@pytest.mark.parametrize(
    "text",
    ["\r", "ក", "ក្", "ស្រ", "ล", "ກ", "က", "क", "क्", "ক", "க", "ක", "ك", "כ", "བ", "ꦏ", "\u1112", "\u1112\u1161", "하\u11ab",
     "👍", "👨\u200d", "👍🏽", "❤", "❤\ufe0f", "☀", "🇰", "🇰🇭", "🏴\U000e0067", "ｶ", "e\u0301", "か\u3099", "1\ufe0f",
     "葛\U000e0100", "\u0600", "ⴰ", "አ"],
)  # fmt: skip
def test_this_waits(text: str) -> None:
    assert safe("the " + text) == safe("the " + text, "always") == "the "


def test_the_first_decomposed_letter_teaches() -> None:
    assert parts("re\u0301sume\u0301 a") == ["r", "e", "", "\u0301", "s", "u", "m", "", "e\u0301", " ", "a"]
    assert parts("re\u0301sume\u0301 a", hold="always")[:5] == ["", "r", "", "e\u0301", "s"]


def test_marks_inside_one_push_teach_too() -> None:
    stream = TEXT.stream()
    assert stream.push(list("re\u0301su".encode())) == "re\u0301s"
    assert stream.push(list(b"m")) == "u"


@pytest.mark.parametrize("script", ["vietnamese", "japanese"])
def test_a_decomposed_prompt_teaches(script: str) -> None:
    prompt, *lines = (decomposed(line) for line in CORPUS[script] if decomposed(line) != line)
    for line in lines:
        assert parts(line, prompt=prompt) == parts(line, hold="always") != parts(line)


def test_only_the_last_tokens_of_a_long_prompt_are_read() -> None:
    assert parts("ab", prompt="e\u0301" + "x" * 4000) == ["", "a", "b"]
    assert parts("ab", prompt="e\u0301" + "x" * 5000) == ["a", "b", ""]


def test_keycaps_make_digits_wait_and_nothing_else() -> None:
    keycap = "1\ufe0f\u20e3"
    assert parts(keycap + "a2\ufe0f\u20e3b 3") == [
        "1", "", "", "\ufe0f\u20e3a", "", "", "", "2\ufe0f\u20e3b", " ", "", "3"
    ]  # fmt: skip
    assert parts("a 2\ufe0f\u20e3", prompt=f"{keycap} First.") == ["a", " ", "", "", "", "2\ufe0f\u20e3"]
    assert parts("a#b", prompt=f"{keycap} Caf e\u0301") == ["", "a", "#", "b"]  # letters have been seen with marks, too


@pytest.mark.parametrize(
    "prompt", ["ខ្ញុំស្រលាញ់ភាសាខ្មែរ។", "हिन्दी में", "👩🏽‍💻❤️ 🇰🇭", "العربيةَ كثيرًا", "Zürich 国", "안녕하세요"]
)
def test_marks_where_they_are_usual_teach_nothing(prompt: str) -> None:
    assert parts("ab1", prompt=prompt) == ["a", "b", "1", ""]
    assert parts(f"{prompt}\nab1")[-4:] == ["a", "b", "1", ""]


def test_a_lone_jamo_after_a_syllable_teaches() -> None:
    assert parts("하\u11ab하\u11ab.") == ["하", "", "\u11ab", "", "하\u11ab", "."]


def test_unknown_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="hold_clusters 'never' is none of auto, always"):
        TEXT.stream(hold_clusters="never")
