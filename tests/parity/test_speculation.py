"""Speculation changes no token: a few hundred random requests, and draws that follow the model's own distribution."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.parity.speculation_cases import BATCH, Cases
from tonle.engine.plan import Join, Plan
from tonle.engine.request import ResolvedConfig
from tonle.engine.run.drafts import DraftedRows
from tonle.engine.sample.sampler import Sampler

ROUNDS = 6  # of BATCH requests; `python -m tests.parity.speculation_cases` runs a thousand
VOCABULARY = 6


def test_random_requests_get_the_same_tokens(tmp_path: Path) -> None:
    cases = Cases(7, tmp_path)
    for number in range(ROUNDS):
        cases.check(number)
    assert cases.counts["cases"] == ROUNDS * BATCH
    assert cases.counts["accepted"] > 120 and cases.counts["drafted"] > 1.2 * cases.counts["accepted"]
    assert cases.counts["preemptions"] > 0 and cases.counts["adapted"] > 0
    assert cases.counts["stop_strings"] > 2 and cases.counts["bound_accepted"] > 10
    assert cases.counts["accepted_ahead"] > 10


def test_what_is_drawn_at_guesses_follows_the_models_distribution() -> None:
    """Chi-square: each place of a chunk of guesses, whenever it is reached, draws from its own distribution."""
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(3, VOCABULARY, generator=generator)  # the places of two guesses, and the one before
    seen: list[Counter[int]] = [Counter() for _ in range(3)]
    guesses = [int(table[0].argmax()), int(table[1].argmax())]
    sampler = Sampler(1, VOCABULARY, [], torch.device("cpu"))
    for seed in range(2500):
        sampler.join(Join(0, [1], [], ResolvedConfig(temperature=0.9), seed))
        plan = Plan(rows=[0], starts=[0], chunks=[[1, *guesses]], samples=[True], drafts={0: 2})
        first = int(sampler.sample(table[:1].clone(), [0], [plan.place(0)])[0])
        drafted = DraftedRows({0: 0}, table[1:].clone())
        drafted.verify(plan, {0: first}, sampler)
        for place, token in enumerate([first, *drafted.more[0]]):
            seen[place][token] += 1
    assert seen[0].total() == 2500
    for place, counts in enumerate(seen):
        total = counts.total()
        expected = torch.softmax(table[place] / 0.9, 0) * total
        assert total > 200, "too few reach this place to tell"
        distance = sum((counts[t] - float(expected[t])) ** 2 / float(expected[t]) for t in range(VOCABULARY))
        assert distance < 20.5, f"place {place}: chi-square {distance:.1f} with 5 degrees of freedom"  # p = 0.001


@pytest.mark.parametrize("right", [0, 1, 2])
def test_guesses_are_kept_up_to_the_first_that_is_wrong(right: int) -> None:
    logits = torch.full((3, VOCABULARY), -5.0)
    for place, token in enumerate([2, 3, 4]):
        logits[place, token] = 5.0
    guesses = [2 if right > 0 else 5, 3 if right > 1 else 5]
    plan = Plan(rows=[0], starts=[0], chunks=[[1, *guesses]], samples=[True], drafts={0: 2})
    sampler = Sampler(1, VOCABULARY, [], torch.device("cpu"))
    sampler.join(Join(0, [1], [], ResolvedConfig(temperature=0.0, logprobs=1), 0))
    drafted = DraftedRows({0: 0}, logits[1:].clone())
    drafted.verify(plan, {0: 2}, sampler)
    assert drafted.more[0] == [3, 4][:right]
    assert [record.token for record in drafted.more_logprobs.get(0, [])] == [3, 4][:right]
