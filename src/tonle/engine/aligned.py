"""`Aligned`: tokens that have log-probabilities go out together with their text.

A stream of text may hold back the end of a token: an incomplete letter, or what may become a stop string. Callers who
ask for log-probabilities line them up with the text they arrive with, so here tokens wait for their text, and text for
its tokens. What goes out is exactly the text of the tokens it comes with.

Does: collect and release both. Does not: decide what is held back; `TextStream` does.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from tonle.engine.request import Delta, TokenLogprob
from tonle.engine.text import TextStream


class _Token(NamedTuple):
    end: int  # characters, from the start of the continuation to the last one this token has a part in
    token: int
    logprob: TokenLogprob


class Aligned:
    """Of one continuation."""

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream
        self._waiting: deque[_Token] = deque()
        self._text = ""  # given by the stream, not released
        self._num_released = 0  # characters

    @property
    def has_tokens(self) -> bool:
        return bool(self._waiting)

    def push(self, tokens: list[int], logprobs: list[TokenLogprob], delta: Delta) -> None:
        """Put what may go out now into `delta`: whole tokens, in order."""
        for token, logprob in zip(tokens, logprobs, strict=True):
            if self._stream.stopped is not None:
                break  # at the token before: those after it are not part of the answer
            self._text += self._stream.push([token])
            end = self._num_released + len(self._text) + self._stream.num_waiting
            self._waiting.append(_Token(end, token, logprob))
        given = self._num_released + len(self._text)
        end = self._num_released
        while self._waiting and self._waiting[0].end <= given:
            end = self._release(delta)
        length = end - self._num_released
        delta.text += self._text[:length]
        self._text = self._text[length:]
        self._num_released = end

    def release_all(self, delta: Delta) -> None:
        """The stream will give no more text."""
        while self._waiting:
            self._release(delta)
        delta.text += self._text
        self._text = ""

    def _release(self, delta: Delta) -> int:
        end, token, logprob = self._waiting.popleft()
        delta.tokens.append(token)
        if delta.logprobs is None:
            delta.logprobs = []
        delta.logprobs.append(logprob)
        return end
