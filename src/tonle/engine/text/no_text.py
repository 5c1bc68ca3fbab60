"""`NoText`: stands for a model's `Text` where there is no tokenizer. Token ids go in and come out.

Does: give empty text for any token; refuse whatever needs a tokenizer, and say so. Does not: know of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from tonle.engine.text.codec import PromptEncoder
from tonle.engine.text.detokenize import Detokenizer
from tonle.engine.text.marks import Marks
from tonle.engine.text.text import Text
from tonle.errors import InvalidRequest


class NoText(Text):
    """The text of every token is empty."""

    def __init__(self) -> None:
        super().__init__(_NoCodec(), bos_id=None, eos_ids=(), template=None, special_tokens_in_content="special")

    def check_stops(self, stop: Sequence[str]) -> None:
        """Raise `InvalidRequest` if there are any: no text would ever match one."""
        if stop:
            _refuse("stop strings", "use stop_token_ids instead, or pass", param="stop")

    def check_tokens_are_bytes(self) -> None:
        _refuse("structured output", "leave it out, or pass", param="structured")

    def _render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        _refuse("chat messages", "give a list of token ids instead, or pass", param="messages")


class _NoCodec:
    vocab_size = 0
    tokens_are_bytes = False

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        _refuse("a prompt of text", "give a list of token ids instead, or pass", param="prompt")

    def special_tokens(self) -> dict[str, int]:
        return {}

    def marked_encoder(self, marks: Marks) -> PromptEncoder:
        _refuse("special tokens in a message", "give a list of token ids instead, or pass", param="messages")

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return ""

    def token_bytes(self, token: int) -> bytes:
        return b""

    def detokenizer(self, prompt: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        return _NoDetokenizer()


class _NoDetokenizer:
    is_open = False

    def push(self, tokens: Sequence[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


def _refuse(what: str, instead: str, *, param: str) -> NoReturn:
    raise InvalidRequest(
        f"this engine has no tokenizer, which {what} would need: {instead} a tokenizer, "
        "InferenceEngine(model, tokenizer, config)",
        param=param,
    )
