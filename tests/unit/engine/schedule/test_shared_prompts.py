"""Continuations of one prompt keep its blocks once, also when the prompt takes several steps to compute."""

from __future__ import annotations

import random

import pytest

from tonle.engine.kv.block_pool import BlockPool
from tonle.engine.plan import StepResult
from tonle.engine.request import Request, ResolvedConfig
from tonle.engine.schedule import Scheduler, SchedulerLimits

BLOCK = 16


def limits(**overrides: int) -> SchedulerLimits:
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "context_length": 2000, "long_prefill_tokens": 256}
    return SchedulerLimits(block_size=BLOCK, **(sizes | overrides))


def prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(1, 300) for _ in range(length)]


def run(scheduler: Scheduler, steps: int) -> None:
    """Plan and commit; the token sampled in place i is 1 + i, so that continuations differ."""
    for _ in range(steps):
        plan = scheduler.plan(0.0)
        sampled = [1 + i for i, samples in enumerate(plan.samples) if samples]
        scheduler.commit(plan, StepResult(tokens=sampled))
        scheduler.verify()


@pytest.mark.parametrize("length", [100, 400, 900, 912, 1001])
@pytest.mark.parametrize("n", [2, 4])
def test_a_prompt_is_held_and_computed_once(length: int, n: int) -> None:
    scheduler = Scheduler(limits(), BlockPool(1000), [])
    for handle in range(n):
        scheduler.add(Request(handle=handle, prompt=prompt(length), config=ResolvedConfig(max_length=50), seed=handle))
    run(scheduler, 6)
    shared = (length - 1) // BLOCK  # full blocks; at least one token is each continuation's own to compute
    own = -(-(length + 6) // BLOCK) - shared  # at most: what is left of the prompt, and the tokens generated since
    assert len(scheduler.running) == n
    assert shared + n <= scheduler.pool.num_held <= shared + n * own
    assert scheduler.prompt_tokens == length + (n - 1) * (length - shared * BLOCK)


def test_prompts_that_part_later_share_what_they_have_in_common() -> None:
    scheduler = Scheduler(limits(), BlockPool(1000), [])
    for handle in range(3):
        ids = [*prompt(800), *prompt(100 + handle)]
        scheduler.add(Request(handle=handle, prompt=ids, config=ResolvedConfig(max_length=50), seed=handle))
    run(scheduler, 10)
    assert len(scheduler.running) == 3
    assert scheduler.prompt_tokens == 800 + 100 + 101 + 102
