"""`ScriptedSpeculator`: guesses what a request will say, as it was recorded before, and errs at a stated rate.

Does: everything that the real one does on a GPU (it looks, weighs, waits, learns), with recorded answers in place of text that
was seen before: models with random weights do not quote. Does not: propose anything for a prompt without a record.
"""

from __future__ import annotations

import random

from tonle.engine.schedule import Sequence
from tonle.engine.speculate import AheadSpeculator
from tonle.engine.speculate.draft_times import DraftTimes
from tonle.engine.speculate.speculator import OwnText
from tonle.engine.speculate.text_index import Match

_MATCH = 8  # tokens that are said to have been equal before


class _NoTimes(DraftTimes):
    """Guesses always pay."""

    def factor(self, rows: int, num_tokens: int) -> float:
        return 0.5


class ScriptedSpeculator(AheadSpeculator):
    def __init__(
        self, max_rows: int, max_tokens: int, *, vocab_size: int, rate: float = 1.0, always: bool = False
    ) -> None:
        """`rate`: of guesses that are right. `always`: whatever steps are measured to take."""
        super().__init__(max_rows, max_tokens)
        self.answers_by_prompt: dict[tuple[int, ...], list[int]] = {}
        self.rate = rate
        self._guesses: dict[int, list[int]] = {}  # by request: its whole answer, with errors
        self._vocab_size = vocab_size
        if always:
            self.times = _NoTimes()

    def record(self, prompt: list[int], answer: list[int]) -> None:
        self.answers_by_prompt[tuple(prompt)] = answer

    def _find(self, sequence: Sequence, own: OwnText) -> Match | None:
        answer = self.answers_by_prompt.get(tuple(sequence.request.prompt))
        if answer is None:
            return None
        handle, said = sequence.request.handle, sequence.num_output
        if (guesses := self._guesses.get(handle)) is None:
            rng = random.Random(handle)
            guesses = [token if rng.random() < self.rate else (token + 1) % self._vocab_size for token in answer]
            self._guesses[handle] = guesses
        return Match(_MATCH, guesses[said : said + 34], [0]) if said < len(guesses) else None
