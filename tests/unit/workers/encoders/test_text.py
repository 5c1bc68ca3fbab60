"""Texts and pairs into token ids: special tokens, cuts, prompts, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.fakes.encoders import VOCAB_SIZE, save_tokenizer
from tonle.errors import ContextOverflow, InvalidRequest, ModelError
from tonle.workers.encoders.text import Cut, EncoderText, TextFacts

LONG = "the cat purrs the dog barks"  # eight tokens, ten with the special ones


def text_with(folder: Path, **facts: Any) -> EncoderText:
    save_tokenizer(folder / "tokenizer.json")
    given = {"max_tokens": 12, "vocab_size": VOCAB_SIZE, "dimensions": 32} | facts
    return EncoderText(TextFacts(tokenizer=str(folder / "tokenizer.json"), **given))


def ids(text: EncoderText, given: str, **options: Any) -> list[int]:
    return list(text.encode([given], ["input"], **options)[0].ids)


def test_what_the_file_says_of_cutting_and_padding_is_not_done(tmp_path: Path) -> None:
    text = text_with(tmp_path)
    assert len(ids(text, LONG)) == 10
    assert ids(text, "cat") == [0, 5, 2]
    assert ids(text, "cat", special=False) == [5]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("most", [3, 5, 9, 10, 12])
def test_a_cut_keeps_the_special_tokens(most: int, side: str, tmp_path: Path) -> None:
    text = text_with(tmp_path)
    theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    theirs.no_padding()
    theirs.enable_truncation(most, direction=side)
    assert ids(text, LONG, cut=Cut(most, side == "left")) == theirs.encode(LONG).ids
    bare = theirs.encode(LONG, add_special_tokens=False).ids
    assert ids(text, LONG, cut=Cut(most, side == "left"), special=False) == bare


def test_a_cut_looks_at_no_more_of_a_text_than_it_must() -> None:
    assert Cut(2).text("x" * 1000) == "x" * 32
    assert Cut(2, True).text("a" * 1000 + "b" * 32) == "b" * 32


def test_a_cut_must_leave_a_token(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="at least 3: the model adds 2"):
        ids(text_with(tmp_path), LONG, cut=Cut(2))


def test_too_long_names_the_place(tmp_path: Path) -> None:
    text = text_with(tmp_path, max_tokens=9)
    with pytest.raises(ContextOverflow, match=r"input\[1\] has 10 tokens, but the model takes 9") as error:
        text.encode(["cat", LONG], ["input[0]", "input[1]"])
    assert error.value.param == "input[1]"


@pytest.mark.parametrize("empty", ["", "  \n"])
def test_empty_is_refused(empty: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="input is empty"):
        ids(text_with(tmp_path), empty)


def test_prompts(tmp_path: Path) -> None:
    text = text_with(tmp_path, prompts={"query": "what ", "passage": "a ", "mine": "b "}, default_prompt="mine")
    assert text.prompt(None, None) == "b "
    assert text.prompt("passage", None) == "a "
    assert text.prompt(None, "query") == text.prompt(None, "search_query") == "what "
    assert text.prompt(None, "document") == text.prompt(None, "search_document") == "a "
    assert ids(text, "cat", prompt="what ") == ids(text, "what cat")
    with pytest.raises(InvalidRequest, match="no prompt 'other'; it has query, passage, mine"):
        text.prompt("other", None)
    with pytest.raises(InvalidRequest, match="input_type must be one of query"):
        text.prompt(None, "classification")


def test_a_model_without_prompts_treats_queries_and_documents_alike(tmp_path: Path) -> None:
    text = text_with(tmp_path)
    assert text.prompt(None, None) == text.prompt(None, "query") == text.prompt(None, "document") == ""


def test_pairs(tmp_path: Path) -> None:
    text = text_with(tmp_path)
    (pair,) = text.encode_pairs("cat", ["dog barks"], ["documents[0]"], None)
    assert list(pair.ids) == [0, 5, 2, 14, 15, 7, 2]
    assert pair.types is not None
    assert list(pair.types) == [0, 0, 0, 1, 1, 1, 1]
    (short,) = text.encode_pairs("cat", [LONG], ["documents[0]"], 2)
    assert list(short.ids) == [0, 5, 2, 4, 5, 2]
    with pytest.raises(ContextOverflow, match=r"documents\[1\] and the query have 15 tokens together"):
        text.encode_pairs("the cat purrs", ["dog", LONG], ["documents[0]", "documents[1]"], None)


def test_a_file_that_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        EncoderText(TextFacts(tokenizer=str(tmp_path / "tokenizer.json"), max_tokens=4, vocab_size=4, dimensions=4))
