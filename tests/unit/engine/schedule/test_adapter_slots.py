"""Which adapter gets which slot: the most urgent first, none for ever, and others go on meanwhile."""

from __future__ import annotations

import pytest

from tonle.engine.kv.block_pool import BlockPool
from tonle.engine.plan import Plan, StepResult
from tonle.engine.request import Request, ResolvedConfig
from tonle.engine.schedule import Scheduler, SchedulerLimits
from tonle.engine.schedule.sequence import Sequence


class Memory:
    """All adapters but `absent` are in memory."""

    def __init__(self) -> None:
        self.absent: set[int] = set()
        self.wanted: set[int] = set()

    def knows(self, adapter: int) -> bool:
        return adapter < 100

    def want(self, adapter: int) -> bool:
        self.wanted.add(adapter)
        return adapter not in self.absent

    def unwant(self, adapter: int) -> None:
        self.wanted.discard(adapter)


class World:
    def __init__(self, slots: int, rows: int = 8) -> None:
        limits = SchedulerLimits(max_num_seqs=rows, max_num_batched_tokens=64, context_length=64, block_size=4,
                                 long_prefill_tokens=64, num_adapter_slots=slots)  # fmt: skip
        self.memory = Memory()
        self.scheduler = Scheduler(limits, BlockPool(400), [], self.memory)
        self.loads: list[tuple[int, int]] = []
        self.ended: list[int] = []
        self._handle = 0

    def ask(self, adapter: int, new: int = 3) -> int:
        """Later ones are less urgent."""
        self._handle += 1
        config = ResolvedConfig(max_length=new)
        self.scheduler.add(
            Request(handle=self._handle, prompt=[1], config=config, adapter=adapter, arrived_s=float(self._handle))
        )
        return self._handle

    def step(self) -> list[int]:
        """Handles that ran in it."""
        plan = self.scheduler.plan(0.0)
        self.scheduler.verify()
        self.loads += plan.adapter_loads
        self.ended += self.scheduler.commit(plan, StepResult([1] * len(plan.rows))).finished
        self.scheduler.verify()
        return _handles(plan)


def _handles(plan: Plan) -> list[int]:
    return [sequence.request.handle for sequence in plan.sequences]


def test_sequences_of_one_adapter_share_a_slot_and_base_needs_none() -> None:
    world = World(slots=2)
    handles = [world.ask(7), world.ask(0), world.ask(7), world.ask(9)]
    plan = world.scheduler.plan(0.0)
    assert _handles(plan) == handles and plan.adapter_loads == [(0, 7), (1, 9)]
    assert [join.adapter_slot for join in plan.joins] == [0, -1, 0, 1]
    assert world.scheduler.slots.running() == [7, 9]


def test_an_adapter_that_is_still_in_its_slot_is_not_loaded_again() -> None:
    world = World(slots=2)
    for adapter in (7, 8, 7, 8):
        world.ask(adapter)
        while not world.scheduler.idle:
            world.step()
    assert world.loads == [(0, 7), (1, 8)]


def test_the_slot_unused_for_longest_is_taken_first() -> None:
    world = World(slots=3)
    for adapter in (7, 8, 9, 7, 4, 8):
        world.ask(adapter)
        while not world.scheduler.idle:
            world.step()
    assert world.loads == [(0, 7), (1, 8), (2, 9), (1, 4), (2, 8)]


def test_a_steady_load_does_not_keep_another_adapter_out() -> None:
    """Two slots, each with requests that follow one another without a gap; a third adapter waits only for those that run."""
    world = World(slots=2)
    for adapter in (1, 2):
        world.ask(adapter, new=4)
    world.step()
    third = world.ask(3, new=4)
    ran: list[int] = []
    for _ in range(6):
        for adapter in (1, 2):
            world.ask(adapter, new=4)
        ran += world.step()
    assert third in ran
    assert len(world.loads) == 3, "the other slot was left alone"


def test_others_go_on_while_a_slot_is_emptied() -> None:
    world = World(slots=2, rows=16)
    world.ask(1, new=10)
    world.ask(2, new=20)
    world.step()
    third = world.ask(3)
    same, other, base = world.ask(1), world.ask(2), world.ask(0)
    assert {other, base} <= set(world.step()), "later requests of other adapters and of none are not held up"
    ran: list[int] = []
    while third not in ran:
        ran = world.step()
        assert same not in ran, "a newcomer would keep the slot from becoming free"
    while same not in world.ended:
        world.step()


def test_every_adapter_has_its_turn() -> None:
    world = World(slots=4, rows=32)
    first = {adapter: world.ask(adapter, new=5) for adapter in range(1, 17)}
    for _ in range(100):
        for adapter in range(1, 17):
            world.ask(adapter, new=5)
        world.step()
        if set(first.values()) <= set(world.ended):
            return
    raise AssertionError(f"never ran: {set(first.values()) - set(world.ended)}")


def test_a_cancelled_request_gives_its_reservation_back() -> None:
    world = World(slots=1)
    world.ask(1, new=30)
    world.step()
    waiting = world.ask(2)
    world.step()
    assert world.memory.wanted >= {2}
    world.scheduler.cancel(waiting)
    later = world.ask(1)
    assert later in world.step(), "the slot takes newcomers again"
    assert 2 not in world.memory.wanted


def test_an_adapter_that_is_being_read_holds_up_no_other() -> None:
    world = World(slots=2)
    world.memory.absent = {5}
    absent, base, other = world.ask(5), world.ask(0), world.ask(6)
    assert world.step() == [base, other]
    world.memory.absent = set()
    assert absent in world.step()


def test_a_failed_step_leaves_no_adapter_where_it_may_not_be() -> None:
    world = World(slots=2)
    handles = [world.ask(1), world.ask(2)]
    plan = world.scheduler.plan(0.0)
    assert world.scheduler.suspect([plan]) == []
    world.scheduler.verify()
    for handle, load in zip(handles, [(0, 1), (0, 2)], strict=True):
        alone = world.scheduler.plan(0.0)
        assert _handles(alone) == [handle] and len(alone.adapter_loads) == 1 and alone.adapter_loads[0][1] == load[1]
        world.scheduler.commit(alone, StepResult([1]))
    while not world.scheduler.idle:
        world.step()


def test_what_a_failed_step_may_not_have_loaded_need_not_stay_in_memory() -> None:
    world = World(slots=2)
    handles = [world.ask(1), world.ask(2)]
    world.scheduler.suspect([world.scheduler.plan(0.0)])
    for handle in handles:
        world.scheduler.cancel(handle)
    world.scheduler.plan(0.0)
    assert world.memory.wanted == set()


def test_a_suspect_gets_a_slot_at_the_cost_of_others() -> None:
    world = World(slots=1, rows=4)
    limits = world.scheduler.limits
    world.ask(1, new=30)
    world.step()
    first, second = world.ask(1), world.ask(0)
    plan = world.scheduler.plan(0.0)
    world.scheduler.suspect([plan])
    assert limits.num_adapter_slots == 1
    seen = set()
    for _ in range(40):
        seen |= set(world.step())
        if world.scheduler.idle:
            break
    assert {first, second} <= seen and world.scheduler.idle


def test_no_salt_makes_a_base_prefix_an_adapters() -> None:
    """Tenants may choose salts; an adapter's digest is no secret."""
    shared = {"prompt": [1, 2, 3, 4], "config": ResolvedConfig(max_length=4), "salt": b"digest"}
    base, adapted = (
        Sequence(Request(handle=1, adapter=adapter, **shared), key=0.0, stops=frozenset()).digests(1, 4)  # type: ignore[arg-type]
        for adapter in (0, 1)
    )
    assert base != adapted


def test_a_number_that_is_not_known_is_refused() -> None:
    world = World(slots=1)
    request = Request(handle=1, prompt=[1], config=ResolvedConfig(max_length=4), adapter=100)
    assert world.scheduler.refusal(request) == "its adapter is not loaded any more"
    bare = Scheduler(world.scheduler.limits, BlockPool(10), [])
    assert bare.refusal(Request(handle=1, prompt=[1], config=ResolvedConfig(max_length=4), adapter=1)) is not None


@pytest.mark.parametrize("adapter", [0, 3])
def test_the_state_for_the_metric(adapter: int) -> None:
    world = World(slots=1, rows=1)
    world.ask(adapter)
    world.ask(adapter)
    world.scheduler.plan(0.0)
    assert world.scheduler.slots.are_used == (adapter != 0)
    assert world.scheduler.slots.running() == ([3] if adapter else [])
    assert world.scheduler.waiting.adapters == ({3: 1} if adapter else {})


def test_the_adapter_of_a_sequence_that_loads_is_used() -> None:
    """Else it could be forgotten before the sequence runs."""

    class Everything:
        """Has every block, and never brings one."""

        def find(self, request: Request, digests: list[bytes], num_held: int) -> Everything | None:
            self.num_blocks = len(digests) - num_held
            return self if self.num_blocks else None

        def begin(self, handle: int, found: object, blocks: list[int]) -> None: ...
        def drop(self, handle: int) -> None: ...

    world = World(slots=1)
    scheduler = world.scheduler
    scheduler.incoming = Everything()
    scheduler.add(Request(handle=1, prompt=[1] * 40, config=ResolvedConfig(max_length=4), adapter=7))
    assert scheduler.uses_adapter(7) and not scheduler.uses_adapter(8)
    assert not scheduler.plan(0.0).rows and 1 in scheduler.loading
    assert scheduler.uses_adapter(7) and not scheduler.uses_adapter(8)
    scheduler.cancel(1)
    assert not scheduler.uses_adapter(7)
