"""A tokenizer from the metadata of a GGUF file.

GGUF keeps a vocabulary, not a tokenizer: how text is split before merging is only named (`tokenizer.ggml.pre`), and
merges of SentencePiece models are implied by scores. This file holds what those names mean.

Does: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`). Does not: guess. A name it does not know is refused,
because a tokenizer that is nearly right makes a model quietly worse.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tonle.errors import ModelError

logger = logging.getLogger(__name__)

# `tokenizer.ggml.token_type`
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


@dataclass(frozen=True, slots=True)
class _Split:
    """How a byte-level model cuts text into words before merging."""

    pattern: str | None = None  # None: GPT-2's own, which `ByteLevel` has built in
    lone_digits: bool = False  # every digit is a word, cut out before the pattern is applied
    nfc: bool = False
    whole_words: bool = False  # a word that is a token is taken as it is, whatever the merges say
    adds_bos: bool = False  # unless the file says otherwise


def _words(letters: str, digits: str, *, after_symbols: str = r"[\r\n]*") -> str:
    return rf"{letters}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{after_symbols}|{_SPACES}"


def _cased(end: str) -> str:
    """Words by case: 'camelCase' is two. `end` is what may close a word."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return rf"{before}{_UPPER}*{_LOWER}+{end}|{before}{_UPPER}+{_LOWER}*{end}"


_PLAIN = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_GPT2 = _Split()
_STARCODER = _Split(lone_digits=True)
_LLAMA3 = _Split(_words(_PLAIN, r"\p{N}{1,3}"), whole_words=True, adds_bos=True)
_GPT4 = _Split(_words(_PLAIN, r"\p{N}{1,3}"))
_QWEN2 = _words(_PLAIN, r"\p{N}")
_GPT4O = _Split(_words(_cased(f"{_CONTRACTIONS}?"), r"\p{N}{1,3}", after_symbols=r"[\r\n/]*"))
_TEKKEN = _words(_cased(""), r"\p{N}", after_symbols=r"[\r\n/]*")

_SPLITS = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _STARCODER,
    "starcoder": _STARCODER,
    "refact": _STARCODER,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _Split(_QWEN2, nfc=True),
    "deepseek-r1-qwen": _Split(_QWEN2),
    "tekken": _Split(_TEKKEN, whole_words=True, adds_bos=True),
    "dbrx": _GPT4,  # also OLMo 2 and Phi-4
    "smaug-bpe": _GPT4,
    "glm4": _GPT4,
    "chatglm-bpe": _GPT4,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer the metadata describes, special tokens and BOS included. Raises `ModelError`."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        split = _split_of(metadata)
        tokenizer, adds_bos = _byte_level(metadata, split), split.adds_bos
    elif kind == "llama":
        tokenizer, adds_bos = _sentencepiece(metadata), True
    else:
        raise ModelError(f"the GGUF file has a tokenizer of kind {kind!r}; supported: gpt2, llama. "
                         f"Use the model's original folder with its tokenizer.json instead")  # fmt: skip
    _add_tokens(tokenizer, metadata)
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) and bos is not None:
        set_bos(tokenizer, int(bos))
    return tokenizer


def set_bos(tokenizer: Tokenizer, bos: int) -> None:
    """Make `encode` put the token `bos` first."""
    token = tokenizer.id_to_token(bos)
    if token is None:
        raise ModelError(f"the beginning-of-text token {bos} is not in the tokenizer's vocabulary")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", "$B"], special_tokens=[(token, bos)]
    )


def _byte_level(metadata: Mapping[str, Any], split: _Split) -> Tokenizer:
    tokenizer = _bpe(_vocabulary(metadata), _stored_merges(metadata), ignore_merges=split.whole_words)
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.lone_digits else []
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split_of(metadata: Mapping[str, Any]) -> _Split:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name == "default":  # written before the format could name it, or by tools that did not know
        logger.warning(
            "the GGUF file does not name its pre-tokenizer: using GPT-2's. Answers may be worse than they should"
        )
        return _GPT2
    if name not in _SPLITS:
        raise ModelError(f"the GGUF file wants the pre-tokenizer {name!r}, which is not supported "
                         f"(supported: {', '.join(sorted(_SPLITS))}). "
                         f"Use the model's original folder with its tokenizer.json instead")  # fmt: skip
    return _SPLITS[name]


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    vocabulary = _vocabulary(metadata)
    merges = _stored_merges(metadata) or _implied_merges(vocabulary, metadata)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    unknown_token = None if unknown is None else metadata["tokenizer.ggml.tokens"][unknown]
    tokenizer = _bpe(vocabulary, merges, unk_token=unknown_token, fuse_unk=True, byte_fallback=True)
    # SentencePiece puts a space before every text, also before one that starts with a space and after a control token.
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    strip: list[Any] = []
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("▁"))
        strip.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # `tokenizers` has no exception of its own
        raise ModelError(f"the GGUF file's tokenizer contradicts itself: {error}") from error


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError("the GGUF file has no vocabulary (tokenizer.ggml.tokens); it holds weights only")
    return {token: index for index, token in enumerate(tokens)}


def _stored_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = (merge.partition(" ") for merge in metadata.get("tokenizer.ggml.merges", ()))
    return [(left, right) for left, _, right in pairs]


def _implied_merges(vocabulary: Mapping[str, int], metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours that make the best-scored token: a merge for each way to part each token."""
    if "tokenizer.ggml.scores" not in metadata:
        raise ModelError("the GGUF file has neither merges nor scores for its tokenizer (tokenizer.ggml.scores)")
    scores = _numbers(metadata["tokenizer.ggml.scores"])
    types = _numbers(metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(scores)))
    ranked = []
    for token, score, kind in zip(metadata["tokenizer.ggml.tokens"], scores, types, strict=False):
        for cut in range(1, len(token) if kind == _NORMAL else 0):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-score, vocabulary[token], left, right))
    ranked.sort()
    tokens = metadata["tokenizer.ggml.tokens"]
    return [(tokens[left], tokens[right]) for *_, left, right in ranked]


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Tokens that are found in text before it is split: control tokens, which decoding skips, and the user-defined."""
    types = _numbers(metadata.get("tokenizer.ggml.token_type", ()))
    typed = list(zip(metadata["tokenizer.ggml.tokens"], types, strict=False))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in typed if kind in (_CONTROL, _UNKNOWN)]
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token, kind in typed if kind == _USER_DEFINED]
    )


def _numbers(values: Any) -> Sequence[Any]:
    """Plain Python numbers, from a list or a numpy array."""
    numbers: Sequence[Any] = values.tolist() if hasattr(values, "tolist") else values
    return numbers
