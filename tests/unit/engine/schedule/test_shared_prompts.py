"""Continuations of one prompt keep its blocks once, also when the prompt takes several steps to compute."""

from __future__ import annotations

import random

import pytest

from tonle.engine.kv.block_pool import BlockPool
from tonle.engine.plan import StepResult
from tonle.engine.request import Request, ResolvedConfig
from tonle.engine.schedule import Scheduler, SchedulerLimits, TunedLimits

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


def test_a_sequence_that_is_not_in_a_step_does_not_rely_on_it() -> None:
    """The step may fail: what it was to write is computed again by the sequences that were in it, and by no others."""
    scheduler = Scheduler(limits(), BlockPool(1000), [])
    for handle, ids in enumerate([[1, 2, 3], prompt(1000), prompt(1000)]):
        scheduler.add(Request(handle=handle, prompt=ids, config=ResolvedConfig(max_length=50), seed=handle))
    run(scheduler, 1)
    scheduler.tuned = TunedLimits(max_num_batched_tokens=1 + 2 * BLOCK, prefill_share=1.0, max_num_seqs=8)
    waits = scheduler.running[2]
    before = (waits.num_computed, list(waits.blocks))
    plan = scheduler.plan(0.0)
    assert [sequence.request.handle for sequence in plan.sequences] == [0, 1], "there is no room for the third"
    assert (waits.num_computed, waits.blocks) == before
    assert scheduler.suspect([plan]) == []
    scheduler.verify()


def test_a_table_is_told_of_the_blocks_that_changed_and_no_others() -> None:
    scheduler = Scheduler(limits(), BlockPool(1000), [])
    for handle in range(2):
        scheduler.add(Request(handle=handle, prompt=prompt(1000), config=ResolvedConfig(max_length=50), seed=handle))
    tables: dict[int, list[int]] = {}
    for step in range(4):
        plan = scheduler.plan(0.0)
        for row, first, blocks in plan.new_blocks:
            table = tables.setdefault(row, [])
            assert step == 0 or table[first : first + len(blocks)] != blocks
            table[first : first + len(blocks)] = blocks
        assert sum(len(blocks) for _, _, blocks in plan.new_blocks) <= 512 // BLOCK + 1 or step == 0
        sampled = [1 for samples in plan.samples if samples]
        scheduler.commit(plan, StepResult(tokens=sampled))
        for sequence in scheduler.running.values():
            assert sequence.row is not None and tables[sequence.row] == sequence.blocks
