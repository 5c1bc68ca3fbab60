"""Log-probabilities from the engine's records into the three shapes callers know.

Does: name tokens, clamp what JSON cannot hold, keep count of text offsets. Does not: compute probabilities.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from tonle.engine.request import TokenLogprob
from tonle.engine.text import Text
from tonle.protocol.openai import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)

LOWEST = -9999.0  # OpenAI's number for "impossible"; JSON has no infinity


def _clamp(logprob: float) -> float:
    return max(logprob, LOWEST)


def chat_logprobs(records: Sequence[TokenLogprob], text: Text) -> ChatLogprobs:
    def entry(record: TokenLogprob) -> ChatTokenLogprob:
        top = [TopLogprob(text.token_text(token), _clamp(value), list(text.token_bytes(token)))
               for token, value in record.top]  # fmt: skip
        token_bytes = list(text.token_bytes(record.token))
        return ChatTokenLogprob(text.token_text(record.token), _clamp(record.logprob), token_bytes, top)

    return ChatLogprobs([entry(record) for record in records])


def prompt_logprobs(records: Sequence[TokenLogprob | None], text: Text) -> PromptLogprobs:
    def entry(record: TokenLogprob) -> dict[str, PromptLogprob]:
        ranks = {token: rank for rank, (token, _) in enumerate(record.top, 1)}
        values = {record.token: record.logprob, **dict(record.top)}
        return {str(token): PromptLogprob(_clamp(value), text.token_text(token), ranks.get(token))
                for token, value in values.items()}  # fmt: skip

    return [None if record is None else entry(record) for record in records]


class CompletionLogprobWriter:
    """Writes the log-probabilities of one choice of /v1/completions, piece by piece; knows how much text is behind."""

    def __init__(self, text: Text, *, skip_special_tokens: bool) -> None:
        self._text = text
        self._skip_special_tokens = skip_special_tokens
        self._offset = 0  # characters
        # A character may be split over tokens; it begins where its first byte is.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, tokens: Sequence[int], records: Sequence[TokenLogprob | None]) -> CompletionLogprobs:
        """`records[i]` belongs to `tokens[i]`; None where nothing stands before the token."""
        piece = CompletionLogprobs([], [], [], [])
        for token, record in zip(tokens, records, strict=True):
            piece.tokens.append(self._text.token_text(token))
            piece.token_logprobs.append(None if record is None else _clamp(record.logprob))
            piece.top_logprobs.append(None if record is None else self._top(record))
            piece.text_offset.append(self._offset)
            self._offset += self._width(token)
        return piece

    def _top(self, record: TokenLogprob) -> dict[str, float]:
        top: dict[str, float] = {}
        # Different tokens can read the same (parts of a character): the likelier one keeps the name.
        for token, value in (*record.top, (record.token, record.logprob)):
            top.setdefault(self._text.token_text(token), _clamp(value))
        return top

    def _width(self, token: int) -> int:
        if self._skip_special_tokens and not self._text.decode([token], skip_special_tokens=True):
            return 0
        return len(self._decoder.decode(self._text.token_bytes(token)))
