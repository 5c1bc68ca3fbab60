"""A byte-level tokenizer of any size, for models whose weights are made up. The same for the same size.

Does: all bytes, the usual pieces of JSON, and words of made-up syllables, with merges that spell them. Does not: compress
any language.
"""

from __future__ import annotations

import random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tonle.engine.text.pieces import byte_alphabet

_JSON = [
    '{"',
    '":',
    '",',
    '"}',
    "},",
    '"]',
    "],",
    'Ġ"',
    'Ġ{"',
    "Ġ[",
    'Ġ["',
    "00",
    "10",
    "20",
    "Ġtrue",
    "Ġfalse",
    "Ġnull",
    '"},',
    '"],',
]

# How long words are, as in vocabularies that were learnt: most have four to nine letters, some are longer.
_LENGTHS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16)
_SHARES = (1, 5, 11, 13, 14, 14, 12, 10, 8, 5, 3, 3, 1)


def synthetic_tokenizer(vocab_size: int, eos_id: int) -> Tokenizer:
    """Tokens 0 up to the special one, `<|end|>`, which is `eos_id`."""
    rng = random.Random(17)
    tokens = {character: byte for byte, character in enumerate(byte_alphabet())}
    merges: list[tuple[str, str]] = []

    def add(left: str, right: str) -> None:
        if left + right not in tokens:
            tokens[left + right] = len(tokens)
            merges.append((left, right))

    for piece in _JSON:
        for end in range(1, len(piece)):
            add(piece[:end], piece[end])
    letters = "abcdefghijklmnopqrstuvwxyz"
    parts: dict[int, list[str]] = {1: list(letters)}  # words by their length
    size = min(eos_id, vocab_size - 1)
    while len(tokens) < size:
        length = rng.choices(_LENGTHS, _SHARES)[0]
        known = [each for each in range(1, length) if parts.get(each)]
        left_length = rng.choice(known)
        left = rng.choice(parts[left_length])
        right = rng.choice(parts.get(length - left_length) or parts[1])
        if left + right in tokens:
            continue
        add(left, right)
        parts.setdefault(len(left + right), []).append(left + right)
        if len(tokens) < size and rng.random() < 0.5:
            add("Ġ", left + right)
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    assert tokenizer.token_to_id("<|end|>") == size
    return tokenizer
