"""A `Drafter` that knows what will come, and errs on purpose: guesses are right for a while, wrong after it, or about nothing."""

from __future__ import annotations

import random

from tonle.engine.plan import Plan
from tonle.engine.schedule import Sequence


class Oracle:
    def __init__(self, seed: int, vocab_size: int, answers: dict[int, list[int]] | None = None) -> None:
        self.answers = answers or {}  # by handle: what is guessed, if not wrong on purpose
        self.num_ended = 0
        self.num_right = 0  # guesses, as it is told
        self._rng = random.Random(seed)
        self._vocab_size = vocab_size

    def begin_step(self, plan: Plan) -> bool:
        return self._rng.random() < 0.9

    def propose_all(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self._propose(sequence, most) for sequence, most in wanted]

    def forget_texts(self) -> None:
        pass

    def release_memory(self) -> None:
        pass

    def _propose(self, sequence: Sequence, most: int) -> list[int]:
        rng = self._rng
        count, right = rng.randint(0, most), rng.choice([0, 1, 2, 3, 5, 8, 32])
        known = self.answers.get(sequence.request.handle, [])[sequence.num_output :]
        wrong = [rng.randrange(self._vocab_size) for _ in range(count)]
        return (known[:right] + wrong)[:count]

    def step_ended(self, plan: Plan, seconds: float, num_accepted: int) -> None:
        self.num_right += num_accepted

    def ended(self, sequence: Sequence) -> None:
        self.num_ended += 1


class AheadOracle(Oracle):
    """The same for a runner that launches steps ahead: sequences wait at random."""

    def choose(self, sequences: list[Sequence]) -> list[Sequence]:
        return sequences

    def look_ahead(self, sequences: list[Sequence], num_rows: int) -> list[Sequence]:
        return [sequence for sequence in sequences if self._rng.random() < 0.5]
