"""`Underway`: the answers that are streaming at this moment, to be shown while a benchmark runs.

Does: count them when asked, twice a second; nothing is done per chunk. Does not: keep answers that have ended.
Runs: `begin` and `end` on the client's event loop; `counts` in any thread.
"""

from __future__ import annotations

import msgspec

from tonle.bench.answer_reader import AnswerReader


class UnderwayCounts(msgspec.Struct, frozen=True):
    waiting: int = 0  # requests that were sent, and have no text yet
    running: int = 0  # that get text
    chunks: int = 0  # with text, of all answers so far, also of those that have ended

    def __add__(self, other: UnderwayCounts) -> UnderwayCounts:
        return UnderwayCounts(self.waiting + other.waiting, self.running + other.running, self.chunks + other.chunks)


class Underway:
    """Owns the set of answers that have begun and not ended."""

    def __init__(self) -> None:
        self._answers: set[AnswerReader] = set()
        self._ended_chunks = 0

    def begin(self, answer: AnswerReader) -> None:
        self._answers.add(answer)

    def end(self, answer: AnswerReader) -> None:
        self._answers.discard(answer)
        self._ended_chunks += len(answer.arrivals_s)

    def counts(self) -> UnderwayCounts:
        chunks = [len(answer.arrivals_s) for answer in list(self._answers)]  # a copy: the event loop adds and removes
        running = sum(count > 0 for count in chunks)
        return UnderwayCounts(len(chunks) - running, running, self._ended_chunks + sum(chunks))
