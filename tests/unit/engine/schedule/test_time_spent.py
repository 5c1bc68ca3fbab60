"""Where a request's time went: each reason to wait, each kind of missed prefix, stalls, preemptions, with and without lag."""

from __future__ import annotations

import pytest

from tests.fakes.step_simulator import Machine, Simulation, limits
from tonle.engine.kv.block_pool import BlockPool
from tonle.engine.plan import Plan, StepResult
from tonle.engine.request import Request, ResolvedConfig
from tonle.engine.schedule import Scheduler, SchedulerLimits, StepNotes, TunedLimits
from tonle.telemetry.time_spent import OtherPrompt, TimeSpent

STEP_S = 1.0  # without prompts
BLOCK = 16


class World:
    """Steps by hand. Each takes a second, and another one for each 100 tokens of prompts."""

    def __init__(self, bounds: SchedulerLimits, num_blocks: int = 1000, *, adapters: object = None) -> None:
        self.scheduler = Scheduler(bounds, BlockPool(num_blocks), [0], adapters)  # type: ignore[arg-type]
        self.notes = self.scheduler.notes = StepNotes()
        self.now = 0.0
        self.spent: dict[int, TimeSpent] = {}

    def ask(self, handle: int, size: int, new: int = 4, *, at: float | None = None, **fields: object) -> None:
        config = fields.pop("config", None) or ResolvedConfig(max_length=new)
        prompt = fields.pop("prompt", None) or [handle + 10, *range(100, 99 + size)]
        request = Request(handle=handle, prompt=prompt, config=config,  # type: ignore[arg-type]
                          arrived_s=self.now if at is None else at, **fields)  # type: ignore[arg-type]  # fmt: skip
        assert self.scheduler.refusal(request) is None
        self.scheduler.add(request)

    def step(self, count: int = 1) -> Plan:
        for _ in range(count):
            plan = self.scheduler.plan(self.now)
            self.now += STEP_S
            if plan.rows:
                self.now += sum(len(plan.chunks[i] or ()) for i in plan.prompts) / 100
                self.notes.step_ended(plan, self.now)
                outcome = self.scheduler.commit(plan, StepResult([1] * sum(plan.samples)))
                self.spent |= outcome.spent
            self.scheduler.verify()
        return plan

    def finish(self) -> None:
        for _ in range(1000):
            if self.scheduler.idle:
                return
            self.step()
        raise AssertionError("it never ended")


def waits(spent: TimeSpent) -> dict[str, float]:
    assert sum(wait.seconds for wait in spent.waits) == pytest.approx(spent.queue_s)
    return {wait.why: pytest.approx(wait.seconds) for wait in spent.waits}


def tight(**changes: object) -> SchedulerLimits:
    return limits(**{"max_num_seqs": 2, "max_num_batched_tokens": 64, "context_length": 400, "long_prefill_tokens": 64,
                     **changes})  # fmt: skip


# -- why it waited


def test_a_step_was_under_way_when_it_came() -> None:
    world = World(tight())
    world.ask(1, 3)
    world.step()
    world.ask(2, 3, at=0.25)  # while that step ran, which took 1.03 s
    world.finish()
    assert waits(world.spent[2]) == {"step": 0.78}
    assert waits(world.spent[1]) == {} and world.spent[1].queue_s == 0


def test_the_tokens_of_steps_went_to_prompts_ahead_of_it() -> None:
    world = World(tight())
    world.ask(1, 128)
    world.ask(2, 40)
    world.finish()
    assert waits(world.spent[2]) == {"prompts": 2 * (STEP_S + 0.64)}
    assert world.spent[2].behind == [OtherPrompt(1, 128, pytest.approx(3.28))]
    assert world.spent[1].behind == []


def test_all_rows_were_taken() -> None:
    world = World(tight())
    for handle in (1, 2, 3):
        world.ask(handle, 4, new=5)
    world.finish()
    assert waits(world.spent[3]) == {"rows": 5 * STEP_S + 0.08}
    assert world.spent[3].behind == [OtherPrompt(1, 4, pytest.approx(1.08))], "of equal prompts one stands for the step"


def test_adaptive_tuning_let_fewer_run() -> None:
    world = World(tight())
    world.scheduler.tuned = TunedLimits(64, 1.0, max_num_seqs=1)
    world.ask(1, 4, new=3)
    world.ask(2, 4)
    world.finish()
    assert waits(world.spent[2]) == {"tuned": 3 * STEP_S + 0.04}


def test_too_few_blocks_were_free() -> None:
    world = World(tight(), num_blocks=25)
    world.ask(1, 320, new=4)
    world.ask(2, 100, new=4)
    world.finish()
    assert waits(world.spent[2]) == {
        "prompts": 5 * STEP_S + 3.2,
        "blocks": 3 * STEP_S,
    }, "while the first prompt takes whole steps, that is why"


class SlowMemory:
    """Adapters that are in memory when they are said to be."""

    def __init__(self) -> None:
        self.present: set[int] = set()

    def knows(self, adapter: int) -> bool:
        return True

    def want(self, adapter: int) -> bool:
        return adapter in self.present

    def unwant(self, adapter: int) -> None:
        pass


def test_its_adapter_was_being_read_while_others_ran() -> None:
    memory = SlowMemory()
    world = World(tight(num_adapter_slots=1), adapters=memory)
    world.ask(1, 4, new=9)
    world.ask(2, 4, adapter=5)
    world.ask(3, 4, new=2)
    world.step(3)
    memory.present.add(5)
    world.finish()
    assert waits(world.spent[2]) == {"adapter": 3 * STEP_S + 0.08}
    assert waits(world.spent[3]) == {}, "it did not stand behind the one that waits for its adapter"


def test_it_waited_for_its_adapter_while_the_queue_waited_for_rows() -> None:
    memory = SlowMemory()
    world = World(tight(num_adapter_slots=1), adapters=memory)
    world.ask(1, 4, new=5)
    world.ask(2, 4, adapter=5)
    world.ask(3, 4, new=5)
    world.ask(4, 4, new=5)  # finds both rows taken
    world.step(3)
    memory.present.add(5)
    world.finish()
    assert waits(world.spent[2]) == {"adapter": 3 * STEP_S + 0.08, "rows": 2 * STEP_S}
    assert waits(world.spent[4]) == {"rows": 5 * STEP_S + 0.08}


def test_the_slot_of_its_adapter_was_held_by_another() -> None:
    memory = SlowMemory()
    memory.present |= {5, 6}
    world = World(tight(num_adapter_slots=1), adapters=memory)
    world.ask(1, 4, new=4, adapter=5)
    world.ask(2, 4, adapter=6)
    world.finish()
    assert waits(world.spent[2]) == {"adapter": 4 * STEP_S + 0.04}


def test_its_grammar_was_being_compiled() -> None:
    world = World(tight())
    world.now = 5.0
    request = Request(handle=1, prompt=[1, 2], config=ResolvedConfig(max_length=2), arrived_s=4.0)
    world.scheduler.add(request, compiled_s=0.75)
    world.finish()
    assert waits(world.spent[1]) == {"step": 0.25, "grammar": 0.75}
    assert [wait.why for wait in world.spent[1].waits] == ["step", "grammar"]


def test_its_static_batch_had_not_begun() -> None:
    world = World(tight(continuous=False, batch_timeout_s=0.0))
    world.ask(1, 4, new=3)
    world.step()
    world.ask(2, 4, new=2)
    world.finish()
    assert waits(world.spent[2]) == {"batch": 2 * STEP_S}


def test_reasons_follow_each_other() -> None:
    world = World(tight(max_num_seqs=1))
    world.ask(1, 128, new=3)
    world.step()
    world.ask(2, 4, at=1.0)  # in the first step, which ends at 1.64
    world.finish()
    assert waits(world.spent[2]) == {"step": 0.64, "prompts": 1.64, "rows": 2 * STEP_S}
    assert [wait.why for wait in world.spent[2].waits] == ["step", "rows", "prompts"], "the longest first"


# -- why its prompt was not in the cache


def missed(world: World, handle: int) -> dict[str, int]:
    spent = world.spent[handle]
    assert spent.cached_tokens + sum(spent.missed.values()) == len(PROMPT)
    return dict(spent.missed)


PROMPT = list(range(1, 101))  # six blocks and four tokens


def test_a_beginning_is_new_once_and_its_end_is_always_computed() -> None:
    world = World(tight())
    for handle in (1, 2):
        world.ask(handle, 0, prompt=PROMPT)
        world.finish()
    assert missed(world, 1) == {"new": 96, "tail": 4}
    assert missed(world, 2) == {"tail": 4} and world.spent[2].cached_tokens == 96
    assert world.scheduler.prefix_missed == {"new": 96, "evicted": 0, "tail": 8, "off": 0}


def test_another_tenant_finds_nothing() -> None:
    world = World(tight())
    for handle in (1, 2):
        world.ask(handle, 0, prompt=PROMPT, salt=b"tenant %d" % handle)
        world.finish()
    assert missed(world, 2) == {"new": 96, "tail": 4}


def test_what_was_evicted_is_told_from_what_is_new() -> None:
    world = World(tight(context_length=160), num_blocks=10)
    world.ask(1, 0, prompt=PROMPT)
    world.finish()
    world.ask(2, 110, new=4)  # takes all that is free, and four blocks of the first one's end
    world.finish()
    world.ask(3, 0, prompt=PROMPT)
    world.finish()
    found = missed(world, 3)
    assert found["tail"] == 4 and "new" not in found
    assert found["evicted"] == 96 - world.spent[3].cached_tokens > 0
    world.ask(4, 0, prompt=[*PROMPT[:48], *range(500, 552)])
    world.finish()
    assert world.spent[4].missed["new"] == 48, "the part that no request had before is new, whatever was evicted"


def test_blocks_behind_one_that_was_evicted_count_as_evicted() -> None:
    world = World(tight())
    world.ask(1, 0, prompt=PROMPT)
    world.finish()
    pool = world.scheduler.pool
    middle = world.scheduler.pool.lookup(_digests(PROMPT)[2])
    pool._idle.move_to_end(middle, last=False)
    pool._free.append(pool._make_free())
    world.ask(2, 0, prompt=PROMPT)
    world.finish()
    assert missed(world, 2) == {"evicted": 64, "tail": 4} and world.spent[2].cached_tokens == 32


def _digests(prompt: list[int]) -> list[bytes]:
    from tonle.engine.kv.block_pool import block_digests, root_digest

    return block_digests(root_digest(b""), prompt, BLOCK)


@pytest.mark.parametrize(
    ("settings", "config", "expected"),
    [
        ({"prefix_caching": False}, ResolvedConfig(max_length=2), {"off": 100}),
        ({}, ResolvedConfig(max_length=2, use_cache=False), {"off": 100}),
        ({}, ResolvedConfig(max_length=2, prompt_logprobs=1, prompt_logprobs_start=50), {"off": 52}),
    ],
)
def test_the_cache_is_off_for_some_requests(
    settings: dict[str, object], config: ResolvedConfig, expected: dict[str, int]
) -> None:
    world = World(tight(**settings))
    for handle, own in ((1, ResolvedConfig(max_length=2)), (2, config)):
        world.ask(handle, 0, prompt=PROMPT, config=own)
        world.finish()
    assert missed(world, 2) == expected


# -- how it was computed


def test_a_prompt_in_chunks_beside_others() -> None:
    world = World(tight(long_prefill_tokens=32))
    world.ask(1, 100)
    world.ask(2, 65)  # 32, 32 and its last token alone
    world.finish()
    one, two = world.spent[1], world.spent[2]
    assert (one.computed_tokens, one.num_chunks) == (100, 4)
    assert (two.computed_tokens, two.num_chunks) == (65, 3)
    assert one.prefill_s == pytest.approx(4 * STEP_S + (64 + 64 + 32 + 4) / 100)
    assert one.prefill_waited_s == two.prefill_waited_s == pytest.approx(0.0)
    assert (one.num_steps, two.num_steps) == (4, 4)


def test_steps_that_had_no_token_of_its_prompt() -> None:
    world = World(tight(max_num_seqs=3, long_prefill_tokens=40))
    world.ask(3, 3, new=50)
    world.step()
    world.ask(1, 120)
    world.ask(2, 60)  # gets 23 tokens of the first step, and none of the next five
    world.step()
    world.scheduler.tuned = TunedLimits(17, 1.0, 3)  # one block beside the one that decodes
    world.finish()
    spent = world.spent[2]
    assert spent.prefill_waited_s == pytest.approx(5 * (STEP_S + 0.16))
    assert spent.behind == [OtherPrompt(1, 120, pytest.approx(spent.prefill_waited_s))]
    assert (spent.num_chunks, spent.queue_s) == (4, 0.0)  # 23, 15 beside two that decode, 15, 7


def test_prompts_of_others_stall_an_answer() -> None:
    world = World(tight(max_num_batched_tokens=151, long_prefill_tokens=151))
    world.ask(1, 4, new=12)
    world.step(3)  # its first token, then two steps without prompts
    world.ask(2, 300, new=2)  # 150 tokens fit beside it
    world.finish()
    spent = world.spent[1]
    assert spent.num_stalled == 2 and spent.stalled_s == pytest.approx(3.0)
    assert spent.stalled_by == [OtherPrompt(2, 300, pytest.approx(3.0))]
    assert spent.decode_s == pytest.approx(11 * STEP_S + 3.0)
    assert (spent.preempted_s, spent.num_preemptions) == (0.0, 0)
    assert world.spent[2].stalled_s == 0, "its own prompt does not stall it"


def test_a_small_prompt_stalls_too_but_is_not_named() -> None:
    world = World(tight())
    world.ask(1, 4, new=12)
    world.step(3)
    world.ask(2, 40, new=2)  # takes 0.4 of 1.4 seconds
    world.finish()
    spent = world.spent[1]
    assert (spent.num_stalled, spent.stalled_s, spent.stalled_by) == (1, pytest.approx(0.4), [])


def test_one_token_of_a_cached_prompt_stalls_none() -> None:
    world = World(tight())
    world.ask(9, 0, prompt=PROMPT[:33], new=1)
    world.finish()
    world.ask(1, 4, new=12)
    world.step(3)
    world.ask(2, 0, prompt=PROMPT[:33], new=2)
    world.finish()
    assert world.spent[2].cached_tokens == 32 and world.spent[2].num_chunks == 1
    assert (world.spent[1].num_stalled, world.spent[1].stalled_by) == (0, [])


def test_what_prompts_add_is_told_before_a_step_without_them_was_seen() -> None:
    notes = StepNotes()
    notes.step_s = 2.0
    assert notes._beyond_plain_s(rows=25, num_tokens=75) == pytest.approx(1.5)
    notes._plain_ended(rows=9)  # that took 2 s
    notes.step_s = 5.0
    assert notes._beyond_plain_s(rows=25, num_tokens=75) == pytest.approx(3.0), "by the nearest size that was seen"
    assert notes._beyond_plain_s(rows=0, num_tokens=75) == 5.0


def test_the_device_is_shared_equally() -> None:
    world = World(tight())
    world.ask(1, 4, new=6)
    world.ask(2, 4, new=3)
    world.finish()
    together, alone = STEP_S * 3 + 0.08, STEP_S * 3
    assert world.spent[2].device_s == pytest.approx(together / 2)
    assert world.spent[1].device_s == pytest.approx(together / 2 + alone)


def test_a_preempted_answer_waits_without_a_row_and_is_computed_again() -> None:
    world = World(tight(context_length=128), num_blocks=8)
    world.ask(1, 40, new=60)
    world.ask(2, 40, new=60)
    world.finish()
    assert world.scheduler.num_preemptions == 1
    early, late = world.spent[1], world.spent[2]
    assert (early.num_preemptions, early.preempted_s) == (0, 0.0)
    assert late.num_preemptions == 1 and late.preempted_s > 10 * STEP_S
    assert late.total_s == pytest.approx(late.queue_s + late.prefill_s + late.decode_s)
    assert late.stalled_s == 0 and late.stalled_by == [], "it is not stalled by what is computed again of itself"
    assert early.num_stalled == 1, "by the other's prompt, the second part of it"
    assert early.device_s + late.device_s == pytest.approx(world.now)


def test_an_embedding_ends_with_its_prompt() -> None:
    world = World(tight())
    request = Request(handle=1, prompt=PROMPT, config=ResolvedConfig(max_length=0), pooling="mean")
    world.scheduler.add(request)
    for _ in range(2):
        plan = world.scheduler.plan(world.now)
        world.now += 1.0
        world.notes.step_ended(plan, world.now)
        pooled = {0: b"1234"} if plan.place(0) == len(PROMPT) else {}
        world.spent |= world.scheduler.commit(plan, StepResult([], pooled=pooled)).spent
    spent = world.spent[1]
    assert (spent.prefill_s, spent.decode_s, spent.num_steps, spent.num_chunks) == (2.0, 0.0, 0, 2)
    assert missed(world, 1) == {"off": 100}


def test_a_failed_step_leaves_the_notes_in_order() -> None:
    world = World(tight())
    world.ask(1, 4, new=3)
    world.ask(2, 4, new=3)
    plan = world.scheduler.plan(world.now)
    assert world.scheduler.suspect([plan]) == []
    world.notes.forget_planned()
    world.now += 1.0
    world.finish()
    assert sorted(world.spent) == [1, 2]
    for spent in world.spent.values():
        assert spent.num_preemptions >= 1 and spent.num_steps == 3


# -- a step ahead of the host


def test_with_lag_a_step_begins_when_the_one_before_it_ends() -> None:
    """Two long prompts in flight one after the other: neither's time is counted twice."""
    machine = Machine(fixed_s=0.01, row_s=0.0, token_s=0.001, read_s=0.0)
    simulation = Simulation(machine, limits(max_num_batched_tokens=512, long_prefill_tokens=512), lag=1)
    first = simulation.ask(0.0, 512, 3)
    second = simulation.ask(0.0, 500, 3)  # fits beside the first one's answer
    third = simulation.ask(0.6, 20, 3)  # while the second one's step runs, from 0.522 to 1.032
    simulation.run()
    first_s, second_s = 0.01 + 0.512, 0.01 + 0.5
    assert simulation.spent[first].prefill_s == pytest.approx(first_s)
    assert simulation.spent[second].prefill_s == pytest.approx(first_s + second_s)
    assert simulation.spent[second].prefill_waited_s == pytest.approx(first_s)
    assert simulation.spent[second].behind == [OtherPrompt(first, 512, pytest.approx(first_s))]
    assert simulation.spent[first].stalled_by[0].handle == second
    late = simulation.spent[third]
    assert late.behind == [OtherPrompt(second, 500, pytest.approx(first_s + second_s - 0.6))], "the part after it came"
    assert sum(spent.device_s for spent in simulation.spent.values()) == pytest.approx(simulation.now)
