"""Random lives of sequences whose prefixes come from elsewhere, or stay leased after their end, among others."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.test_scheduler import EOS, Device, Memory, _random_request, _whose, worlds
from tonle.engine.kv.block_pool import BlockPool
from tonle.engine.plan import Plan, StepResult
from tonle.engine.request import Request, ResolvedConfig
from tonle.engine.schedule import Scheduler, SchedulerLimits


@dataclass
class Found:
    request: Request
    first: int  # place of the first wanted block in the prompt
    num_blocks: int


class Elsewhere:
    """Brings blocks into the device's slots, at random moments, in part, or not at all."""

    def __init__(self, device: Device, rng: random.Random, *, stalls: bool = False) -> None:
        self.device = device
        self.rng = rng
        self.stalls = stalls
        self.scheduler: Scheduler | None = None
        self.under_way: dict[int, tuple[Found, list[int]]] = {}
        self.num_begun = self.num_whole = self.num_dropped = 0

    def find(self, request: Request, digests: list[bytes], num_held: int) -> Found | None:
        if request.handle % 3 == 0:
            return None
        most = len(digests) - num_held
        return Found(request, num_held, self.rng.randint(1, most)) if most > 0 else None

    def begin(self, handle: int, found: Found, blocks: list[int]) -> None:
        assert len(blocks) == found.num_blocks and handle not in self.under_way
        self.under_way[handle] = found, blocks
        self.num_begun += 1

    def drop(self, handle: int) -> None:
        del self.under_way[handle]
        self.num_dropped += 1

    def advance(self, share: float) -> None:
        """As `Incoming.advance`: some are over."""
        assert self.scheduler is not None
        for handle, (found, blocks) in list(self.under_way.items()):
            if self.stalls or self.rng.random() > share:
                continue
            del self.under_way[handle]
            count = self.rng.choice([len(blocks), len(blocks), 0, self.rng.randint(0, len(blocks))])
            self.num_whole += count == len(blocks)
            size = self.device.block_size
            for place, block in enumerate(blocks[:count], start=found.first):
                for offset in range(size):
                    position = place * size + offset
                    token = found.request.prompt[position]
                    self.device.slots[block * size + offset] = (position, token, *_whose(found.request))
            self.scheduler.loaded(handle, count)


@settings(max_examples=150, deadline=None)
@given(worlds(), st.integers(0, 2**32), st.sampled_from([0.05, 0.5, 1.0]))
def test_random_life_with_loads_and_leases(world: tuple[SchedulerLimits, int, int], seed: int, share: float) -> None:
    limits, num_blocks, lag = world
    rng = random.Random(seed)
    pool = BlockPool(num_blocks, max_idle=rng.choice([None, 0, 3]), gc_threshold=rng.choice([1.0, 0.5]))
    memory = Memory(rng, most=limits.num_adapter_slots)
    scheduler = Scheduler(limits, pool, [EOS], memory)
    device = Device(num_blocks, limits.block_size)
    scheduler.incoming = elsewhere = Elsewhere(device, rng)
    elsewhere.scheduler = scheduler
    flights: list[tuple[Plan, StepResult]] = []
    requests: dict[int, Request] = {}
    ended: dict[int, str] = {}
    now, handle = 0.0, 0
    for step in range(6000):
        now += rng.choice([0.0, 0.1, 3.0])
        if step < 60 and rng.random() < 0.5:
            handle += 1
            request = _random_request(rng, handle, now, limits.context_length)
            requests[handle] = msgspec.structs.replace(request, keep_blocks=rng.random() < 0.4)
            scheduler.add(requests[handle])
        if rng.random() < 0.08 and requests:
            victim = rng.choice(list(requests))
            if scheduler.cancel(victim):
                ended[victim] = "cancelled"
        elsewhere.advance(share)
        for leased in [h for h in scheduler.leases if rng.random() < 0.2]:
            _check_leased(device, requests[leased], scheduler.leases[leased])
            scheduler.end_lease(leased)
        if step < 60 and not flights and rng.random() < 0.02:
            scheduler.recompute()
        scheduler.verify()
        plan = scheduler.plan(now)
        scheduler.verify()
        assert elsewhere.under_way.keys() == scheduler.loading.keys(), "two accounts of what is loading"
        memory.load(plan)
        if plan.rows and step < 60 and rng.random() < 0.03:
            ended |= dict.fromkeys(scheduler.suspect([plan, *(flight for flight, _ in flights)]), "error")
            flights.clear()
            device.adapters |= {slot: -1 for slot, _ in plan.adapter_loads}
            scheduler.verify()
            continue
        if plan.rows:
            flights.append((plan, device.run(plan)))
        while len(flights) > (lag if plan.rows else 0):
            outcome = scheduler.commit(*flights.pop(0))
            assert not ended.keys() & outcome.handles, "a token after the end"
            ended |= {h: reason for h, (reason, _) in outcome.finished.items()}
            scheduler.verify()
        if step >= 60 and scheduler.idle and not flights and not scheduler.leases:
            break
    assert scheduler.idle, "a request starved"
    assert ended.keys() == requests.keys()
    assert not scheduler.leases and not elsewhere.under_way
    assert pool.num_available == num_blocks, "a block leaked"
    pool.verify([])


def _check_leased(device: Device, request: Request, blocks: list[int]) -> None:
    """What another engine would fetch is the prompt's."""
    assert len(blocks) == len(request.prompt) // device.block_size
    for position, token in enumerate(request.prompt[: len(blocks) * device.block_size]):
        slot = blocks[position // device.block_size] * device.block_size + position % device.block_size
        assert device.slots[slot] == (position, token, *_whose(request))


def _scheduler(num_blocks: int, *, rows: int = 4) -> tuple[Scheduler, Elsewhere]:
    limits = SchedulerLimits(
        max_num_seqs=rows, max_num_batched_tokens=64, context_length=40, block_size=4, long_prefill_tokens=64
    )
    scheduler = Scheduler(limits, BlockPool(num_blocks), [EOS])
    scheduler.incoming = elsewhere = Elsewhere(Device(num_blocks, 4), random.Random(0))
    elsewhere.scheduler = scheduler
    return scheduler, elsewhere


def _request(handle: int, size: int, *, arrived_s: float = 0.0, keep: bool = False) -> Request:
    config = ResolvedConfig(max_length=4)
    return Request(handle=handle, prompt=[1 + handle % 4] * size, config=config, arrived_s=arrived_s, keep_blocks=keep)


def test_only_what_did_not_come_is_computed() -> None:
    scheduler, elsewhere = _scheduler(12)
    scheduler.add(_request(1, 18))
    assert not scheduler.plan(0.0).rows
    found, blocks = elsewhere.under_way.pop(1)
    assert 1 <= found.num_blocks <= 4 and scheduler.pool.num_held == 5
    scheduler.loaded(1, len(blocks))
    plan = scheduler.plan(0.0)
    assert plan.starts == [4 * len(blocks)] and len(plan.chunks[0] or ()) == 18 - 4 * len(blocks)
    assert scheduler.started[1] == (0.0, 4 * len(blocks))
    assert scheduler.loaded_tokens == 4 * len(blocks) and scheduler.prefix_hits == 0


def test_what_did_not_come_at_all_is_computed_from_the_start() -> None:
    scheduler, elsewhere = _scheduler(12)
    scheduler.add(_request(1, 18))
    scheduler.plan(0.0)
    del elsewhere.under_way[1]
    scheduler.loaded(1, 0)
    plan = scheduler.plan(0.0)
    assert plan.starts == [0] and len(plan.chunks[0] or ()) == 18
    assert not elsewhere.under_way, "it is not asked for twice"


@pytest.mark.parametrize("begins", [True, False])
def test_others_overtake_a_load_that_never_ends_and_take_its_blocks_if_they_are_more_urgent(begins: bool) -> None:
    scheduler, elsewhere = _scheduler(10)
    elsewhere.stalls = True
    scheduler.add(_request(1, 18, arrived_s=5.0))
    scheduler.plan(5.0)
    assert list(scheduler.loading) == [1]
    scheduler.add(_request(3, 30 if begins else 18, arrived_s=1.0 if begins else 9.0))
    plan = scheduler.plan(9.0)
    assert plan.rows and plan.sequences[0].request.handle == 3
    assert list(scheduler.loading) == ([] if begins else [1])
    scheduler.verify()


def test_a_lease_outlives_its_request_and_its_blocks_are_free_after_it() -> None:
    scheduler, _ = _scheduler(12)
    scheduler.add(_request(3, 18, keep=True))
    while 3 not in scheduler.leases:
        plan = scheduler.plan(0.0)
        scheduler.commit(plan, StepResult([1] * sum(plan.samples)))
    scheduler.verify()
    assert scheduler.idle and scheduler.num_leased_blocks == 4 == scheduler.pool.num_held
    scheduler.end_lease(3)
    scheduler.verify()
    assert scheduler.pool.num_held == 0


def test_a_running_sequence_takes_the_blocks_of_a_load_that_came_later() -> None:
    scheduler, elsewhere = _scheduler(10)
    elsewhere.stalls = True
    scheduler.add(_request(3, 15))  # four blocks, and a fifth for its answer
    plan = scheduler.plan(0.0)
    scheduler.commit(plan, StepResult([1]))
    scheduler.add(_request(1, 23, arrived_s=1.0))
    for _ in range(3):
        plan = scheduler.plan(1.0)
        scheduler.verify()
        scheduler.commit(plan, StepResult([1] * sum(plan.samples)))
    assert elsewhere.num_begun == elsewhere.num_dropped == 1
    assert scheduler.num_preemptions == 0 and 3 not in scheduler.running, "it ended without losing its row"
