"""`llguidance`'s view of a model's tokens.

Does: the bytes of every token, which of them are special, which end an answer, and how text is written in tokens, from our
`Text`. Does not: know grammars. Takes some tenths of a second, so it is made on the compiler's thread.
"""

from __future__ import annotations

from collections.abc import Iterable

from llguidance import LLTokenizer

from tonle.engine.text import Text
from tonle.errors import ContextOverflow, InvalidRequest


def make_vocabulary(text: Text, vocab_size: int, eos_ids: Iterable[int]) -> LLTokenizer:
    """`vocab_size`: the model's, which may be wider than the tokenizer's; ids that no token has stand for nothing, and are never
    allowed. Raises `InvalidRequest` where the tokenizer does not tell what bytes its tokens stand for."""
    text.check_tokens_are_bytes()
    ends = sorted({token for token in (*eos_ids, *text.eos_ids) if token < vocab_size})
    if not ends:
        raise InvalidRequest(
            "this model has no end-of-sequence token, so that an answer bound by a grammar could not end"
        )
    return LLTokenizer(_Tokens(text, vocab_size, ends[0]), eos_token=ends)  # type: ignore[arg-type]


_BEFORE = "\n"  # ends a word in every tokenizer


class _Tokens:
    """What `LLTokenizer` asks for."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, text: Text, vocab_size: int, eos_id: int) -> None:
        self.eos_token_id = eos_id
        self.tokens = [text.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = [token for token in text.special_tokens.values() if token < vocab_size]
        self._text = text
        self._special = frozenset(self.special_token_ids)
        self._lengths: list[int] = []  # of tokens, longest first; filled with `_ids`
        self._ids: dict[bytes, int] = {}

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens whose bytes are exactly those of `text`: as the model's own tokenizer writes it wherever that is so."""
        data = text.encode() if isinstance(text, str) else text
        written = data.decode(errors="replace")
        try:
            tokens = self._text.encode(written, add_special_tokens=False)
        except ContextOverflow:  # longer than any answer: how it is written does not matter
            return self._longest(data)
        if self._stand_for(tokens, data):
            return tokens
        before = self._text.encode(_BEFORE, add_special_tokens=False)  # a tokenizer that puts a space before each text
        tokens = self._text.encode(_BEFORE + written, add_special_tokens=False)
        if tokens[: len(before)] == before and self._stand_for(tokens[len(before) :], data):
            return tokens[len(before) :]
        return self._longest(data)  # it was normalized, or reads as a special token

    def _stand_for(self, tokens: list[int], data: bytes) -> bool:
        return self._special.isdisjoint(tokens) and b"".join(map(self.tokens.__getitem__, tokens)) == data

    def _longest(self, data: bytes) -> list[int]:
        """The longest token at each place."""
        if not self._ids:
            self._ids = {
                piece: token for token, piece in enumerate(self.tokens) if piece and token not in self._special
            }
            self._lengths = sorted({len(piece) for piece in self._ids}, reverse=True)
        tokens, at = [], 0
        while at < len(data):
            found = (self._ids.get(data[at : at + length]) for length in self._lengths)
            token = next((token for token in found if token is not None), None)
            if token is None:  # a tokenizer without this byte: no token can be forced from here
                break
            tokens.append(token)
            at += len(self.tokens[token])
        return tokens
