"""`Continuation`: one of a request's n answers on the front's side, from tokens to text.

Does: keep its stream of text, and tokens that are not delivered yet. Does not: know the engine (`front.py` does).
"""

from __future__ import annotations

from tonle.engine.aligned import Aligned
from tonle.engine.generation import Generation
from tonle.engine.request import Delta, TokenLogprob
from tonle.engine.text import TextStream


class Continuation:
    """One of a generation's n: its text so far, and tokens that are not delivered yet."""

    __slots__ = ("aligned", "generation", "held", "held_logprobs", "index", "stream")

    def __init__(self, generation: Generation, index: int, stream: TextStream) -> None:
        self.generation = generation
        self.index = index
        self.stream = stream
        self.aligned: Aligned | None = None  # with log-probabilities
        self.held: list[int] = []  # not in the stream yet: the caller waits for the whole result
        self.held_logprobs: list[TokenLogprob] = []

    @property
    def has_tokens(self) -> bool:
        """Whether it got tokens that it has not delivered."""
        return bool(self.held) or (self.aligned is not None and self.aligned.has_tokens)

    def hold(self, tokens: list[int], logprobs: list[TokenLogprob] | None) -> None:
        self.held += tokens
        self.held_logprobs += logprobs or ()

    def delta(self, tokens: list[int], logprobs: list[TokenLogprob] | None) -> Delta:
        """These tokens, with those held before them, as text. With log-probabilities, some may wait for their text."""
        if self.held:
            tokens, self.held = self.held + tokens, []
        if self.held_logprobs:
            logprobs, self.held_logprobs = self.held_logprobs + (logprobs or []), []
        if logprobs is None:
            if len(tokens) > 1 and self.generation.config.stop:
                return self._up_to_stop(tokens)
            return Delta(self.index, self.stream.push(tokens), tokens)
        if self.aligned is None:
            self.aligned = Aligned(self.stream)
        delta = Delta(self.index, "", [], [])
        self.aligned.push(tokens, logprobs, delta)
        return delta

    def _up_to_stop(self, tokens: list[int]) -> Delta:
        """Tokens that came together, to the one that completes a stop string: as if they had come one by one."""
        text, count = "", 0
        while count < len(tokens) and self.stream.stopped is None:
            text += self.stream.push(tokens[count : count + 1])
            count += 1
        return Delta(self.index, text, tokens[:count])

    def finish(self, delta: Delta) -> None:
        """No more tokens will come: put all that waits into `delta`."""
        if self.aligned is not None:
            self.aligned.release_all(delta)
        delta.text += self.stream.finish()
