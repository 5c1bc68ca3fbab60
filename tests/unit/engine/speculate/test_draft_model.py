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
        self.token_s = 0.0  # of each token of a pass, besides
        self.num_tokens = 0  # computed

    def perf_counter(self) -> float:
        return self.now

    def forward(self, inputs: StepInputs, kv: KVCache) -> torch.Tensor:
        """A decoder that always finds the same token most likely."""
        self.num_tokens += len(inputs.tokens)
        self.now += self.pass_s + self.token_s * len(inputs.tokens)
        logits = torch.zeros(len(inputs.logit_indices), 16)
        logits[:, GUESS] = 1.0
        return logits


class Served:
    """One sequence at a time, whose steps take 10 ms, and 0.1 ms more for each guess."""

    def __init__(self, clock: Clock, context_length: int = 1000) -> None:
        kv = cast(KVCache, SimpleNamespace(block_size=16))
        self.drafter = DraftModel(clock, kv, num_blocks=64, max_rows=4, max_tokens=64, max_length=4,
                                  context_length=context_length, vocab_size=16, own_vocab_size=16)  # fmt: skip
        self.clock = clock
        self.sequence = self.begin()

    def begin(self, num_prompt: int = 3, max_length: int = 500, row: int = 0) -> Sequence:
        begun = sequence([1 + n % 9 for n in range(num_prompt)], num_prompt=num_prompt)
        begun.max_tokens = num_prompt + max_length
        begun.row, begun.blocks = row, list(range(40))
        return begun

    def answer(self, *asked: Sequence, token: int = GUESS) -> list[int]:
        """Steps that these are in together, to their ends. Guesses for each."""
        num_guesses = [0] * len(asked)
        while left := [n for n, each in enumerate(asked) if len(each.tokens) < each.max_tokens]:
            wanted = [(asked[n], min(4, asked[n].max_tokens - len(asked[n].tokens) - 1)) for n in left]
            began = self.clock.now
            found = self.drafter.propose_all(wanted) if self.drafter.begin_step(step(len(left))) else [[] for _ in left]
            for n, guesses in zip(left, found, strict=True):
                asked[n].tokens += [token] * (1 + (len(guesses) if token == GUESS else 0))
                num_guesses[n] += len(guesses)
            total = sum(map(len, found))
            self.clock.now += 0.01 + 0.0001 * total
            self.drafter.step_ended(step(len(left), total), self.clock.now - began, total if token == GUESS else 0)
        return num_guesses

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


def test_what_guessing_took_is_taken_off_the_time_of_its_own_step_alone(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step after it is full, and its drafter is not asked."""
    served, learnt = Served(clock), []
    monkeypatch.setattr(served.drafter._cost, "learn", lambda plan, seconds: learnt.append(seconds))
    served.sequence.tokens.append(GUESS)
    assert served.drafter.begin_step(step(1))
    assert served.drafter.propose_all([(served.sequence, 4)]) != [[]]
    served.drafter.step_ended(step(1, 1), 0.020, 0)
    served.drafter.step_ended(step(1), 0.010, 0)
    assert learnt == [pytest.approx(0.020 - clock.now), 0.010]


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


def test_a_long_prompt_is_not_followed_for_a_short_answer(clock: Clock) -> None:
    served = Served(clock, context_length=4000)
    clock.token_s = 0.0005
    for _ in range(5):
        assert served.answer(served.begin(2500, 8)) == [0]
    assert clock.num_tokens == 0
    assert served.answer(served.begin(3, 500))[0] > 300
    for _ in range(5):
        assert served.answer(served.begin(2500, 8)) == [0]
    assert served.answer(served.begin(2500, 1000))[0] > 500


def test_short_requests_do_not_wait_until_a_long_prompt_is_followed(clock: Clock) -> None:
    served = Served(clock, context_length=4000)
    served.answer(served.begin(100, 500))
    long, *short = [served.begin(2500, 400), *(served.begin(4, 8, row) for row in (1, 2))]
    of_long, *of_short = served.answer(long, *short)
    assert of_long > 100 and min(of_short) >= 4


def test_where_all_prompts_are_long_guesses_are_tried_once_in_a_while(clock: Clock) -> None:
    """Bad luck does not last, and to find that out takes a small part of the time."""
    clock.token_s = 0.0002
    served = Served(clock, context_length=4000)
    served.answer(served.begin(3, 500))
    served.run(400, token=GUESS + 1)
    clock.num_tokens, began = 0, clock.now
    for _ in range(40):
        served.answer(served.begin(2500, 300), token=GUESS + 1)
    assert clock.num_tokens > 2500 and clock.num_tokens * clock.token_s < (clock.now - began) / 10
    for _ in range(9):
        served.answer(served.begin(2500, 300))
    assert served.answer(served.begin(2500, 300))[0] > 150
