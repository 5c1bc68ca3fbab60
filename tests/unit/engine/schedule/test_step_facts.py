"""What the controller is told about a step."""

from __future__ import annotations

from tests.fakes.step_simulator import limits
from tonle.engine.kv.block_pool import BlockPool
from tonle.engine.plan import StepResult
from tonle.engine.request import Request, RequestPriority, ResolvedConfig
from tonle.engine.schedule import Scheduler, facts_of
from tonle.engine.schedule.step_facts import StepFacts


def facts_of_steps(requests: list[Request], num_steps: int, *, budget: int) -> list[StepFacts]:
    """One request joins with each step."""
    scheduler = Scheduler(limits(max_num_seqs=4, max_num_batched_tokens=budget), BlockPool(100), [])
    found = []
    for step in range(num_steps):
        if step < len(requests):
            scheduler.add(requests[step])
        plan = scheduler.plan(0.0)
        found.append(facts_of(plan, 0.0, waiting_s=0.0, demand=len(scheduler.running)))
        scheduler.commit(plan, StepResult([1] * sum(plan.samples)))
    return found


def test_a_step_advances_an_answer_whichever_sequence_comes_first() -> None:
    """In the third step the last token of an urgent prompt stands before a sequence that decodes."""
    config = ResolvedConfig(max_length=50)
    begun = Request(handle=1, prompt=[1, 2, 3], config=config, arrived_s=1.0)
    urgent = Request(handle=2, prompt=list(range(17)), config=config, priority=RequestPriority.CRITICAL, arrived_s=2.0)
    first, second, third = facts_of_steps([begun, urgent], 3, budget=17)
    assert [facts.advances for facts in (first, second, third)] == [False, True, True]
    assert [facts.arrivals for facts in (first, second, third)] == [[1.0], [], [2.0]]
    assert [(facts.work.rows, facts.work.tokens) for facts in (first, second, third)] == [(0, 3), (1, 16), (2, 0)]


def test_a_sequence_with_guesses_decodes() -> None:
    """Not a prompt: what the controller allows those would follow from it."""
    scheduler = Scheduler(limits(max_num_seqs=4, max_num_batched_tokens=32), BlockPool(100), [])
    for handle in (1, 2):
        scheduler.add(Request(handle=handle, prompt=[1, 2, 3], config=ResolvedConfig(max_length=50)))
    scheduler.commit(scheduler.plan(0.0), StepResult([1, 1]))
    plan = scheduler.plan(0.0)
    assert plan.chunks == [[1], [1]]
    plan.chunks[0], plan.drafts[0] = [1, 5, 6, 7], 3
    facts = facts_of(plan, 0.0, waiting_s=0.0, demand=2)
    assert (facts.work.rows, facts.work.tokens, facts.depth, facts.decode_reads, facts.advances) == (2, 3, 0, 6, True)
    assert facts.work.reads == 6 + 3 * 4
