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

from tonle.engine.text.codec import Codec, rust_codec
from tonle.engine.text.detokenize import Detokenizer, WindowDetokenizer
from tonle.engine.text.template import ChatTemplate
from tonle.engine.text.text import Text
from tonle.errors import ConfigError


def live_text(tokenizer: Any, chat_template: str | None = None) -> Text:
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

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        options = {"add_special_tokens": add_special_tokens} if self._can_add else {}
        return [int(token) for token in self._encode(text, **options)]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        options = {"skip_special_tokens": skip_special_tokens} if self._can_skip else {}
        return str(self._decode(list(tokens), **options))

    def token_bytes(self, token: int) -> bytes:
        return self.decode([token], skip_special_tokens=False).encode()

    def detokenizer(self, prompt: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        return WindowDetokenizer(partial(self.decode, skip_special_tokens=skip_special_tokens), context=prompt)


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
