"""A vocabulary of one token per byte, and special tokens: enough to walk through a grammar."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer

_LIKELY = frozenset(b'"}])>/\n')  # bytes that bring a walk to its end


class ByteVocabulary:
    """`special`: texts that are one token each, and that no bytes stand for."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, special: Sequence[str] = ()) -> None:
        self.special_tokens = {text: 257 + number for number, text in enumerate(special)}
        self.eos_token_id = 256
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"<eos>", *(text.encode() for text in special)]
        self.special_token_ids = [256, *self.special_tokens.values()]
        self._split = re.compile("|".join(map(re.escape, special)) or r"(?!)")
        self._tokenizer = LLTokenizer(self)  # type: ignore[arg-type]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def encode(self, text: str) -> list[int]:
        tokens, at = [], 0
        for found in self._split.finditer(text):
            tokens += [*text[at : found.start()].encode(), self.special_tokens[found[0]]]
            at = found.end()
        return [*tokens, *text[at:].encode()]

    def matcher(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(grammar))
        assert not matcher.is_error(), f"{matcher.get_error()}\n{grammar}"
        return matcher

    def accepts(self, grammar: str, text: str) -> bool:
        matcher, tokens = self.matcher(grammar), self.encode(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    def walk(self, grammar: str, rng: random.Random, *, begin: str = "", most: int = 3000) -> str | None:
        """A random text of the grammar that begins so; None if none has ended after so many tokens."""
        matcher, tokens = self.matcher(grammar), self.encode(begin)
        assert matcher.try_consume_tokens(tokens) == len(tokens), (begin, grammar)
        while len(tokens) < most:
            mask = matcher.compute_bitmask()
            allowed = [token for token in range(len(self.tokens)) if mask[token // 8] >> token % 8 & 1]
            if not allowed or (self.eos_token_id in allowed and (len(allowed) == 1 or rng.random() < 0.5)):
                return b"".join(map(self.tokens.__getitem__, tokens)).decode()
            likely = [token for token in allowed if token in _LIKELY]
            token = rng.choice(likely if likely and rng.random() < 0.3 else allowed)
            if token == self.eos_token_id:
                continue
            assert matcher.consume_token(token), matcher.get_error()
            tokens.append(token)
        return None
