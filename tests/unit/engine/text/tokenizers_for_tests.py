"""Small tokenizers: one token per byte, the hardest case for a stream of text."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tonle.engine.text.pieces import byte_alphabet

EOS = 256  # the one special token


def byte_level_tokenizer() -> Tokenizer:
    """A real byte-level BPE without merges: token i is byte i."""
    tokenizer = Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    return tokenizer


class PlainTokenizer:
    """What a caller may bring: encode, decode, and nothing of any library."""

    vocab_size = 257
    eos_token_id = EOS

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")
