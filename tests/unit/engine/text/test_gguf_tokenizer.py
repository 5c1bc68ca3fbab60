"""Tokenizers rebuilt from GGUF metadata, against `transformers` for the default model and against the algorithms."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from tests.unit.engine.text.corpus import CORPUS, SENTENCES, mixtures
from tonle.engine.text.codec import rust_codec
from tonle.engine.text.gguf_tokenizer import tokenizer_from_gguf
from tonle.engine.text.pieces import byte_alphabet
from tonle.errors import ModelError
from tonle.models.gguf_file import GGUFFile
from tonle.models.source import ModelSource

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def byte_level_metadata(pre: str | None, *words: str, **more: Any) -> dict[str, Any]:
    """All bytes, `words` with merges that build them from the left, one control and one user-defined token."""
    alphabet = list(byte_alphabet())
    merges, built = [], []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in built:
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
                built.append(word[:end])
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["<end>", "<think>", *alphabet, *built],
        "tokenizer.ggml.token_type": [CONTROL, USER_DEFINED] + [NORMAL] * (len(alphabet) + len(built)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    return metadata | {f"tokenizer.ggml.{name}": value for name, value in more.items()}


def sentencepiece_metadata(pieces: Mapping[str, float], **more: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(pieces.values()),
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.ggml.{name}": value for name, value in more.items()}


def pieces_of(tokenizer: Tokenizer, text: str, **options: Any) -> list[str]:
    return tokenizer.encode(text, **options).tokens


# The default model


@pytest.fixture(scope="module")
def default_tokenizer(default_model: ModelSource) -> Tokenizer:
    return tokenizer_from_gguf(GGUFFile(default_model.path).metadata)


@pytest.fixture(scope="module")
def transformers_tokenizer(default_model: ModelSource) -> Any:
    import transformers

    path = default_model.path
    return transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


@pytest.mark.model
def test_same_tokens_as_transformers(default_tokenizer: Tokenizer, transformers_tokenizer: Any) -> None:
    chats = [f"<|im_start|>user\n{line}<|im_end|>\n<|endoftext|>" for line in SENTENCES]
    for text in [*SENTENCES, *chats, *mixtures(seed=8, count=100), "  a\n\n b\t\tc  ", "it's we'LL I'd", ""]:
        plain = "".join(char for char in text if not char.isnumeric())  # see the next test
        assert default_tokenizer.encode(plain).ids == transformers_tokenizer.encode(plain)


@pytest.mark.model
def test_digits_are_words_of_their_own(default_tokenizer: Tokenizer, transformers_tokenizer: Any) -> None:
    """The model's own tokenizer parts digits first ("smollm"); the conversion in transformers leaves that step out."""
    assert pieces_of(default_tokenizer, "in  2024") == ["in", "ĠĠ", "2", "0", "2", "4"]
    core = transformers_tokenizer.backend_tokenizer
    corrected = Tokenizer.from_str(core.to_str())
    corrected.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), core.pre_tokenizer]
    )
    for text in [*SENTENCES, "x=12345 + 6", "٣٤  ១២៣ ²½", "10%  of 3,000.50\n 7"]:
        assert default_tokenizer.encode(text).ids == corrected.encode(text).ids


@pytest.mark.model
def test_every_token_of_the_default_model_has_its_bytes(default_tokenizer: Tokenizer) -> None:
    codec = rust_codec(default_tokenizer)
    for line in SENTENCES:
        tokens = codec.encode(line, add_special_tokens=False)
        assert b"".join(map(codec.token_bytes, tokens)) == line.encode()
    assert codec.token_bytes(1) == b"<|im_start|>"
    assert codec.token_bytes(10**6) == b""  # beyond the vocabulary
    for token in range(codec.vocab_size):
        assert codec.decode([token], skip_special_tokens=False) == default_tokenizer.decode(
            [token], skip_special_tokens=False
        )


# Byte-level


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "I'm 123 x\n\n y", "I|'m|Ġ123|Ġx|ĊĊ|Ġy"),
        ("smollm", "a  12 b", "a|ĠĠ|1|2|Ġb"),
        ("llama-bpe", "I'M 12345!!\n x", "I|'M|Ġ|123|45|!!Ċ|Ġx"),
        ("dbrx", "I'M 12345!!\n x", "I|'M|Ġ|123|45|!!Ċ|Ġx"),
        ("qwen2", "I'M 123 a", "I|'M|Ġ|1|2|3|Ġa"),
        ("tekken", "camelCase 12/\n", "camel|Case|Ġ|1|2|/Ċ"),
        ("gpt-4o", "camelCase's 1234", "camel|Case's|Ġ|123|4"),
    ],
)
def test_words_before_merging(pre: str, text: str, words: str) -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata(pre))
    assert tokenizer.pre_tokenizer is not None
    assert [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == words.split("|")


def test_merges_and_special_tokens() -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata("gpt-2", "Ġthe", "the"))
    assert pieces_of(tokenizer, "the the<end><think>then") == ["the", "Ġthe", "<end>", "<think>", "the", "n"]
    codec = rust_codec(tokenizer)
    tokens = codec.encode("a<end><think>", add_special_tokens=True)
    assert codec.decode(tokens, skip_special_tokens=True) == "a<think>"
    assert codec.decode(tokens, skip_special_tokens=False) == "a<end><think>"


def test_bos_is_the_files_choice_then_the_familys() -> None:
    assert pieces_of(tokenizer_from_gguf(byte_level_metadata("llama-bpe")), "a") == ["<end>", "a"]
    assert pieces_of(tokenizer_from_gguf(byte_level_metadata("llama-bpe", add_bos_token=False)), "a") == ["a"]
    assert pieces_of(tokenizer_from_gguf(byte_level_metadata("qwen2")), "a") == ["a"]
    with_bos = tokenizer_from_gguf(byte_level_metadata("qwen2", add_bos_token=True))
    assert pieces_of(with_bos, "a") == ["<end>", "a"]
    assert pieces_of(with_bos, "a", add_special_tokens=False) == ["a"]


def test_whole_words_need_no_merges() -> None:
    metadata = byte_level_metadata("llama-bpe")
    metadata["tokenizer.ggml.tokens"].append("whole")
    metadata["tokenizer.ggml.token_type"].append(NORMAL)
    assert pieces_of(tokenizer_from_gguf(metadata), "whole", add_special_tokens=False) == ["whole"]


def test_qwen_composes() -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata("qwen2"))
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("é").ids


def test_unknown_pre_tokenizers_are_refused() -> None:
    with pytest.raises(ModelError, match="'klingon'"):
        tokenizer_from_gguf(byte_level_metadata("klingon"))


def test_a_missing_pre_tokenizer_is_gpt2_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="tonle"):
        tokenizer = tokenizer_from_gguf(byte_level_metadata(None))
    assert "pre-tokenizer" in caplog.text
    assert pieces_of(tokenizer, "ab") == ["a", "b"]


# SentencePiece

PIECES = {"▁": -1.0, "a": -2.0, "b": -2.5, "c": -3.0, "ab": -4.0, "bc": -4.5, "▁a": -5.0, "abc": -6.0, "▁ab": -7.0,
          "▁abc": -8.0, "ក": -9.0, "្": -9.5, "ក្": -10.0}  # fmt: skip


def sentencepiece_reference(text: str, pieces: Mapping[str, float]) -> list[str]:
    """SentencePiece's rule, literally: join the neighbours whose join scores best, the leftmost of equals."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        joins = [(pieces[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in pieces]
        if not joins:
            break
        at = -max(joins)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [p for part in parts for p in ([part] if part in pieces else [f"<0x{b:02X}>" for b in part.encode()])]


@pytest.mark.parametrize("text", ["abc", "abcabc ab bca", " a  b", "ក្ក", "aéb", "🇰🇭", "cba\n"])
def test_merges_follow_scores(text: str) -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(PIECES))
    assert pieces_of(tokenizer, text) == ["<s>", *sentencepiece_reference(text, PIECES)]
    codec = rust_codec(tokenizer)
    assert codec.decode(codec.encode(text, add_special_tokens=True), skip_special_tokens=True) == text


def test_sentencepiece_texts_survive() -> None:
    codec = rust_codec(tokenizer_from_gguf(sentencepiece_metadata(PIECES)))
    for line in CORPUS["khmer"] + CORPUS["mixed"] + [" leading", "trailing "]:
        assert codec.decode(codec.encode(line, add_special_tokens=True), skip_special_tokens=True) == line


def test_the_leading_space_is_as_in_the_whole_text() -> None:
    codec = rust_codec(tokenizer_from_gguf(sentencepiece_metadata(PIECES)))
    bos, *tokens = codec.encode("ab ab", add_special_tokens=True)
    prompt, output = [bos, *tokens[:1]], tokens[1:]
    assert codec.detokenizer(prompt, skip_special_tokens=True).push(output) == " ab"
    assert codec.detokenizer([bos], skip_special_tokens=True).push(tokens) == "ab ab"  # the space BOS put there
    assert codec.detokenizer([], skip_special_tokens=True).push(tokens) == "ab ab"
    assert codec.detokenizer([bos], skip_special_tokens=False).push(tokens) == " ab ab"


def test_no_space_prefix() -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(PIECES, add_space_prefix=False, add_bos_token=False))
    assert pieces_of(tokenizer, "ab ab") == ["ab", "▁ab"]
    codec = rust_codec(tokenizer)
    assert codec.decode(codec.encode(" ab", add_special_tokens=True), skip_special_tokens=True) == " ab"


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({}, "None"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"}, "no vocabulary"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a"]}, "neither merges nor scores"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": ["a"],
             "tokenizer.ggml.merges": ["x y"]},
            "contradicts itself",
        ),
    ],
)  # fmt: skip
def test_files_refused(metadata: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        tokenizer_from_gguf(metadata)
