"""Text to tokens and back, by a `tokenizers` tokenizer.

Does: encode, decode, say what a token stands for, start a detokenizer. Does not: know of chat, special roles of
tokens, or files. Safe to use from several threads at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from tokenizers import Tokenizer

from tonle.engine.text.detokenize import ByteDetokenizer, Detokenizer, WindowDetokenizer
from tonle.engine.text.marks import MarkedEncoder, Marks, special_tokens
from tonle.engine.text.pieces import Pieces, Spelling, spelling_of


class PromptEncoder(Protocol):
    """See `MarkedEncoder`."""

    def is_needed(self, prompt: str) -> bool: ...

    def encode(self, prompt: str) -> list[int]: ...


class Codec(Protocol):
    vocab_size: int
    tokens_are_bytes: bool  # text is the bytes of its tokens, one after the other: see `token_bytes`

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def special_tokens(self) -> dict[str, int]:
        """Special tokens, by what they are written as."""

    def marked_encoder(self, marks: Marks) -> PromptEncoder:
        """For prompts in which only the marks are special tokens."""

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...

    def detokenizer(self, prompt: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        """For the tokens that continue `prompt`: their text is as in the decoded whole."""


def rust_codec(tokenizer: Tokenizer) -> Codec:
    """The codec that fits how this tokenizer writes its tokens. The tokenizer belongs to the codec from now on."""
    tokenizer.no_truncation()  # files carry these settings from training
    tokenizer.no_padding()
    spelling = spelling_of(tokenizer)
    if spelling is None:
        return DecodingCodec(tokenizer)
    return PieceCodec(tokenizer, spelling)


class _RustCodec:
    tokens_are_bytes = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # The batch call computes no offsets and, unlike the single one, lets other threads run meanwhile.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        tokens: list[int] = encoding.ids
        return tokens

    def special_tokens(self) -> dict[str, int]:
        return special_tokens(self._tokenizer)

    def marked_encoder(self, marks: Marks) -> PromptEncoder:
        return MarkedEncoder(self._tokenizer, marks)


class PieceCodec(_RustCodec):
    """Tokens are bytes: decoding is joining them."""

    tokens_are_bytes = True

    def __init__(self, tokenizer: Tokenizer, spelling: Spelling) -> None:
        super().__init__(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        special = [token for token, entry in added.items() if entry.special]
        self._all = Pieces(tokenizer, spelling.alphabet)
        self._plain = Pieces(tokenizer, spelling.alphabet, skipped=special)
        self._drops_first_space = spelling.drops_first_space

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        pieces = self._plain if skip_special_tokens else self._all
        data = b"".join(map(pieces.__getitem__, tokens))
        return (data.removeprefix(b" ") if self._drops_first_space else data).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return self._all[token]

    def detokenizer(self, prompt: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        pieces = self._plain if skip_special_tokens else self._all
        at_start = self._drops_first_space and not any(map(pieces.__getitem__, prompt))
        return ByteDetokenizer(pieces, drop_first_space=at_start)


class DecodingCodec(_RustCodec):
    """Tokens are whatever the tokenizer's decoder makes of them together."""

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token: int) -> bytes:
        return self.decode([token], skip_special_tokens=False).encode()

    def detokenizer(self, prompt: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        return WindowDetokenizer(partial(self.decode, skip_special_tokens=skip_special_tokens), context=prompt)
