"""What a caller may ask of an answer's text: each form accepts what it says, and nothing else."""

from __future__ import annotations

import contextlib
import time

import pytest

from tests.fakes.grammars import accepts
from tonle.engine.grammar.grammar_text import grammar_text
from tonle.engine.request import StructuredOutput
from tonle.errors import InvalidRequest

S = StructuredOutput


@pytest.mark.parametrize(
    ("structured", "good", "bad"),
    [
        (S(json_object=True), ['{"a": [1, {"b": null}]}', "{}"], ["[]", '"a"', '{"a": 1', '{"a":1}', '{ "a": 1}']),
        (S(json=True), ["[1, 2]", '"x"', "null"], ["nul", "[1,2]"]),
        (S(json='{"type": "integer"}'), ["12"], ["x"]),
        (S(regex=r"\d{3}/[a-c]+"), ["123/abc"], ["12/abc", "123/", "១២៣/a"]),
        (S(regex=r"^(yes|no)$"), ["yes", "no"], ["maybe", ""]),
        (S(regex=r"costs \$"), ["costs $"], ["costs "]),
        (S(regex="a\nb/\\/"), ["a\nb//"], ["a b//"]),
        (S(regex=""), [""], ["a"]),
        (S(choice=["red", "green", "ខ្មែរ", 'say "hi"\n\\', "red"]), ["red", "ខ្មែរ", 'say "hi"\n\\'], ["blue", "re"]),
        (S(choice=["", "a"]), ["", "a"], ["b"]),
        (S(grammar='start: "a" B+\nB: /[0-9]/'), ["a1", "a12"], ["a", "1"]),
        (S(grammar='root ::= "a" [0-9]+'), ["a1", "a12"], ["a", "1"]),
    ],
)
def test_each_form_accepts_what_it_says(structured: StructuredOutput, good: list[str], bad: list[str]) -> None:
    assert [answer for answer in good if not accepts(structured, answer)] == []
    assert [answer for answer in bad if accepts(structured, answer)] == []


@pytest.mark.parametrize(
    ("structured", "words"),
    [
        (S(), "exactly one of json, json_object, regex, choice, grammar, structural_tag; none was given"),
        (S(regex="a", choice=["b"]), "regex and choice were given"),
        (S(json=False), "allows no answer"),
        (S(json="{"), "not valid JSON"),
        (S(json="[1]"), "an object, true or false, not list"),
        (S(json=b"x"), "an object, true or false, not bytes"),  # type: ignore[arg-type]
        (S(json={"a": object()}), "cannot be written as JSON"),
        (S(json={"enum": ["\ud800"]}), "cannot be written as JSON"),
        (S(regex=7), "must be a string, not int"),  # type: ignore[arg-type]
        (S(regex="a" * 20_000), "has 20000 characters; at most 16384"),
        (S(regex="(" * 8_000 + ")" * 8_000), "more than 100 levels"),
        (S(choice=[]), "at least one string"),
        (S(choice=[1]), "at least one string"),  # type: ignore[list-item]
        (S(choice=["a"] * 10_001), "10001 texts; at most 10000"),
        (S(choice=["a" * 300_000]), "300000 bytes; at most 262144"),
        (S(choice=["\ud800"]), "surrogate"),
        (S(grammar=" "), "the text of a grammar"),
        (S(grammar="start: " + "(" * 10_000), "more than 100 levels"),
        (S(grammar="start: a\n" + "a: b\n" * 3_000), "3001 rules; at most 400"),
        (S(grammar="a" * 300_000), "300000 bytes"),
        (S(structural_tag=[]), "must be an object"),  # type: ignore[arg-type]
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(structured: StructuredOutput, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammar_text(structured)
    assert words in caught.value.message
    assert caught.value.param == "structured"


@pytest.mark.parametrize(
    "structured",
    [
        S(grammar='"\\"' * 60_000),
        S(grammar="\n" * 250_000),
        S(grammar="a " * 120_000),
        S(grammar="a\t::" * 60_000),
        S(grammar="root ::= " + "a " * 30_000),
        S(grammar="root ::= " + '"a" | ' * 10_000),
        S(grammar="root ::= " + "[a" * 30_000),
        S(regex="\\" * 16_000),
        S(grammar="root ::= " + "".join(f'"a" r{i}\nr{i} ::= ' for i in range(1_999)) + '"b"'),
        S(json='"' + "\\" * 250_000),
    ],
)
def test_reading_takes_one_pass_over_the_text(structured: StructuredOutput) -> None:
    """It runs on the event loop that all callers share. Processor time of this thread, and far more than it takes."""
    began = time.thread_time()
    with contextlib.suppress(InvalidRequest):
        grammar_text(structured)
    assert time.thread_time() - began < 2.0
