"""Tokenizer objects a caller brings along.

Does: take a `transformers` tokenizer's Rust core where it has one; adapt any object with `encode` and `decode`
otherwise. Does not: import transformers. The caller's object is never changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from tokenizers import Tokenizer

from tonle.engine.text.codec import Codec, PromptEncoder, rust_codec
from tonle.engine.text.detokenize import Detokenizer, WindowDetokenizer
from tonle.engine.text.marks import Marks, encode_pieces
from tonle.engine.text.template import ChatTemplate
from tonle.engine.text.text import Text
from tonle.errors import ConfigError


def live_text(tokenizer: Any, chat_template: str | None = None, *, special_tokens_in_content: str = "text") -> Text:
    core = tokenizer if isinstance(tokenizer, Tokenizer) else getattr(tokenizer, "backend_tokenizer", None)
    codec: Codec
    if isinstance(core, Tokenizer):
        codec = rust_codec(Tokenizer.from_str(core.to_str()))  # a copy: transformers sets truncation on its own
    else:
        codec = LiveCodec(tokenizer)
    template = chat_template or getattr(tokenizer, "chat_template", None)
    return Text(
        codec,
        bos_id=next(iter(_ids(getattr(tokenizer, "bos_token_id", None))), None),
        eos_ids=_ids(getattr(tokenizer, "eos_token_id", None)),
        template=ChatTemplate(template, special_tokens=_special_tokens(tokenizer)) if template else None,
        special_tokens_in_content=special_tokens_in_content,
    )


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(token) for token in value] if isinstance(value, Iterable) else [int(value)]


def _special_tokens(tokenizer: Any) -> dict[str, str]:
    tokens = getattr(tokenizer, "special_tokens_map", None) or {}
    return {name: str(token) for name, token in tokens.items() if not isinstance(token, list | tuple | dict)}


class LiveCodec:
    """Any object with `encode(text)` and `decode(tokens)`. Options it does not name are not passed to it."""

    tokens_are_bytes = False

    def __init__(self, tokenizer: Any) -> None:
        for name in ("encode", "decode"):
            if not callable(getattr(tokenizer, name, None)):
                raise ConfigError(
                    f"a tokenizer needs encode(text) and decode(tokens); {type(tokenizer).__name__} has no {name}",
                    param="tokenizer",
                )
        self.vocab_size = _vocab_size(tokenizer)
        self._encode = tokenizer.encode
        self._decode = tokenizer.decode
        self._can_add = _takes(tokenizer.encode, "add_special_tokens")
        self._can_skip = _takes(tokenizer.decode, "skip_special_tokens")
        self._can_split = _takes(tokenizer.encode, "split_special_tokens")
        self._special_ids = _special_ids(tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        options = {"add_special_tokens": add_special_tokens} if self._can_add else {}
        return [int(token) for token in self._encode(text, **options)]

    def special_tokens(self) -> dict[str, int]:
        return dict(self._special_ids)

    def marked_encoder(self, marks: Marks) -> PromptEncoder:
        return _LiveMarkedEncoder(self._encode_as_text, marks, self._special_ids)

    def _encode_as_text(self, text: str) -> list[int]:
        """Without special tokens, if the tokenizer has an option for that."""
        options = {"add_special_tokens": False} if self._can_add else {}
        options |= {"split_special_tokens": True} if self._can_split else {}
        return [int(token) for token in self._encode(text, **options)]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        options = {"skip_special_tokens": skip_special_tokens} if self._can_skip else {}
        return str(self._decode(list(tokens), **options))

    def token_bytes(self, token: int) -> bytes:
        return self.decode([token], skip_special_tokens=False).encode()

    def detokenizer(self, prompt: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        return WindowDetokenizer(partial(self.decode, skip_special_tokens=skip_special_tokens), context=prompt)


class _LiveMarkedEncoder:
    """A `PromptEncoder` that encodes what is between the marks piece by piece."""

    def __init__(self, encode: Callable[[str], list[int]], marks: Marks, ids: dict[str, int]) -> None:
        self._marks = marks
        self.is_needed = marks.any_text_in
        self.encode = partial(encode_pieces, marks=marks, encode=encode, ids=ids)


def _special_ids(tokenizer: Any) -> dict[str, int]:
    """By their text, of a tokenizer that tells (those of `transformers` do)."""
    texts, id_of = getattr(tokenizer, "all_special_tokens", None), getattr(tokenizer, "convert_tokens_to_ids", None)
    if not texts or not callable(id_of):
        return {}
    return {str(text): int(id_of(str(text))) for text in texts}


def _vocab_size(tokenizer: Any) -> int:
    if hasattr(tokenizer, "__len__"):
        return len(tokenizer)
    size = getattr(tokenizer, "vocab_size", None)
    if not isinstance(size, int):
        raise ConfigError(
            f"{type(tokenizer).__name__} does not say how many tokens it has: give it a vocab_size", param="tokenizer"
        )
    return size


def _takes(function: Callable[..., Any], option: str) -> bool:
    try:
        return option in inspect.signature(function).parameters
    except (TypeError, ValueError):  # built-in functions do not tell
        return False
