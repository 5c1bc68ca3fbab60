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
    parts = list("abcdefghijklmnopqrstuvwxyz")
    size = min(eos_id, vocab_size - 1)
    while len(tokens) < size:
        left, right = rng.choice(parts), rng.choice(parts)
        if len(left + right) <= 12 and left + right not in tokens:
            add(left, right)
            parts.append(left + right)
            if len(tokens) < size:
                add("Ġ", left + right)
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    assert tokenizer.token_to_id("<|end|>") == size
    return tokenizer
