"""When a draft model guesses: where that pays, and again after bad luck."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from tests.unit.engine.speculate.test_speculator import sequence, step
from tonle.engine.schedule import Sequence
from tonle.engine.speculate import draft_model
from tonle.engine.speculate.draft_model import DraftModel
from tonle.models.inputs import KVCache, StepInputs

GUESS = 7


class Clock:
    """What time passes is said, not measured."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pass_s = 0.001

    def perf_counter(self) -> float:
        return self.now

    def forward(self, inputs: StepInputs, kv: KVCache) -> torch.Tensor:
        """A decoder that always finds the same token most likely."""
        self.now += self.pass_s
        logits = torch.zeros(len(inputs.logit_indices), 16)
        logits[:, GUESS] = 1.0
        return logits


class Served:
    """One sequence at a time, whose steps take 10 ms, and 0.1 ms more for each guess."""

    def __init__(self, clock: Clock) -> None:
        kv = cast(KVCache, SimpleNamespace(block_size=16))
        self.drafter = DraftModel(clock, kv, num_blocks=64, max_rows=4, max_tokens=64, max_length=4, context_length=1000,
                                  vocab_size=16, own_vocab_size=16)  # fmt: skip
        self.clock = clock
        self.sequence = self.begin()

    def begin(self) -> Sequence:
        begun = sequence([1, 2, 3])
        begun.row, begun.blocks = 0, list(range(40))
        return begun

    def run(self, steps: int, token: int = GUESS) -> int:
        """Each brings the guesses that are right, and `token`. Guesses that were made."""
        num_guesses = 0
        for _ in range(steps):
            plan, found, began = step(1), [], self.clock.now
            if self.drafter.begin_step(plan):
                found = self.drafter.propose_all([(self.sequence, 4)])[0]
            num_right = len(found) if token == GUESS else 0
            self.sequence.tokens += [token] * (1 + num_right)
            self.clock.now += 0.01 + 0.0001 * len(found)
            self.drafter.step_ended(step(1, len(found)), self.clock.now - began, num_right)
            if len(self.sequence.tokens) > 500:
                self.drafter.ended(self.sequence)
                self.sequence = self.begin()
            num_guesses += len(found)
        return num_guesses


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(draft_model, "time", made)
    return made


def test_it_guesses_where_that_pays(clock: Clock) -> None:
    served = Served(clock)
    served.run(50)
    assert served.run(100) > 200


def test_it_does_not_where_its_own_passes_take_longer_than_they_bring(clock: Clock) -> None:
    served = Served(clock)
    clock.pass_s = 0.02
    served.run(50)
    assert served.run(100) < 20


def test_passes_of_one_step_that_were_held_up_do_not_end_it(clock: Clock) -> None:
    served = Served(clock)
    served.run(50)
    clock.pass_s = 5.0
    served.run(1)
    clock.pass_s = 0.001
    assert served.run(100) > 200


def test_where_its_passes_became_slow_it_is_tried_again(clock: Clock) -> None:
    served = Served(clock)
    served.run(50)
    clock.pass_s = 0.05
    served.run(50)
    clock.pass_s = 0.001
    assert served.run(100) < 20, "it seems not to pay"
    served.run(128 * 60)
    assert served.run(100) > 200


def test_guesses_that_were_wrong_for_a_while_are_tried_again(clock: Clock) -> None:
    served = Served(clock)
    served.run(50)
    served.run(400, token=GUESS + 1)
    assert served.run(100, token=GUESS + 1) < 20
    served.run(128 * 40)
    assert served.run(100) > 200
