"""Thousands of random arrive / cancel / finish / preempt / fail steps, with every block, row and slot recounted after each."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonle.engine.kv.block_pool import BlockPool
from tonle.engine.plan import Plan, StepResult
from tonle.engine.request import Request, ResolvedConfig
from tonle.engine.schedule import Scheduler, SchedulerLimits

EOS = 0


class Device:
    """A model whose 'KV cache' remembers which token of which prefix was written where, so that reuse can be checked.

    A slot holds its token, position, tenant and adapter. Reading a row back must give the row's own tokens: any stale, wrongly
    shared or stolen block shows, and so does a row that is computed with another adapter than its own.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[int, tuple[int, ...]] = {}
        self.tables: dict[int, list[int]] = {}
        self.last: dict[int, int] = {}
        self.rng = random.Random(7)
        self.adapters: dict[int, int] = {-1: 0}  # by slot
        self.slot_of: dict[int, int] = {}  # by row

    def run(self, plan: Plan) -> StepResult:
        self.adapters |= dict(plan.adapter_loads)
        self.slot_of |= {join.row: join.adapter_slot for join in plan.joins}
        for row, sequence in zip(plan.rows, plan.sequences, strict=True):
            assert self.adapters[self.slot_of[row]] == sequence.request.adapter, "a row has another's adapter"
        for row, first, blocks in plan.new_blocks:
            table = self.tables.setdefault(row, [])
            table[first : first + len(blocks)] = blocks
        tokens_of = []
        for i, row in enumerate(plan.rows):  # write everything first, as a layer does
            chunk = plan.chunks[i] if plan.chunks[i] is not None else [self.last[row]]
            tokens_of.append(chunk)
            for j, token in enumerate(chunk):
                self._write(row, plan.starts[i] + j, token, plan.sequences[i])
        sampled = []
        for i, row in enumerate(plan.rows):
            end = plan.starts[i] + len(tokens_of[i])
            self._check(row, end, plan.sequences[i])
            if plan.samples[i]:
                token = self.rng.choice([EOS, 1, 1, 2, 2, 3, 3, 4])
                self.last[row] = token
                sampled.append(token)
        return StepResult(sampled)

    def _slot(self, row: int, position: int) -> int:
        return self.tables[row][position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, row: int, position: int, token: int, sequence: object) -> None:
        self.slots[self._slot(row, position)] = (position, token, *_whose(sequence.request))

    def _check(self, row: int, end: int, sequence: object) -> None:
        for position in range(end):
            known = sequence.tokens[position] if position < len(sequence.tokens) else self.last[row]
            assert self.slots[self._slot(row, position)] == (position, known, *_whose(sequence.request))


def _whose(request: Request) -> tuple[bytes, int]:
    return request.salt, request.adapter


class Memory:
    """Adapters of the host, of which few are in memory: the others are there when they have been asked for a while."""

    def __init__(self, rng: random.Random, most: int) -> None:
        self._rng = rng
        self._most = most
        self.present: list[int] = []
        self.wanted: set[int] = set()

    def knows(self, adapter: int) -> bool:
        return True

    def want(self, adapter: int) -> bool:
        self.wanted.add(adapter)
        if adapter not in self.present and self._rng.random() < 0.3:
            self.present.append(adapter)
            for other in [a for a in self.present if a not in self.wanted][: len(self.present) - self._most]:
                self.present.remove(other)
        return adapter in self.present

    def unwant(self, adapter: int) -> None:
        self.wanted.discard(adapter)  # or it was loaded meanwhile

    def load(self, plan: Plan) -> None:
        for _, adapter in plan.adapter_loads:
            assert adapter in self.present, "it is loaded from memory, where it is not"
            self.wanted.remove(adapter)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[SchedulerLimits, int, int]:
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    context = draw(st.integers(8, 80))
    num_blocks = -(-context // block_size) + draw(st.integers(0, 30))
    limits = SchedulerLimits(
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(6, 40)),
        context_length=context,
        block_size=block_size,
        long_prefill_tokens=draw(st.integers(1, 40)),
        ageing_s=draw(st.sampled_from([0.0, 5.0])),
        prefix_caching=draw(st.booleans()),
        continuous=draw(st.booleans()),
        num_adapter_slots=draw(st.integers(1, 4)),
    )
    return limits, num_blocks, draw(st.integers(0, 1))


def _random_request(rng: random.Random, handle: int, now: float, context: int) -> Request:
    size = rng.randint(1, context - 1)
    shared = [1, 2, 3, 4] * 20
    prompt = shared[: min(size, rng.choice([0, 8, 16, 40]))]
    prompt += [rng.randint(1, 4) for _ in range(size - len(prompt))]
    config = ResolvedConfig(max_length=rng.randint(1, context - size), min_tokens=0, early_stopping=rng.random() < 0.7)
    adapter = rng.choice([0, 0, 1, 2, 3, 4, 5])
    return Request(handle=handle, prompt=prompt, config=config, priority=rng.randint(0, 3), arrived_s=now,
                   salt=rng.choice([b"", b"tenant"]) + bytes([adapter] * bool(adapter)), adapter=adapter)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(worlds(), st.integers(0, 2**32))
def test_random_life(world: tuple[SchedulerLimits, int, int], seed: int) -> None:
    limits, num_blocks, lag = world
    rng = random.Random(seed)
    pool = BlockPool(num_blocks, max_idle=rng.choice([None, 0, 3]), gc_threshold=rng.choice([1.0, 0.5]))
    memory = Memory(rng, most=limits.num_adapter_slots)
    scheduler = Scheduler(limits, pool, [EOS], memory)
    device = Device(num_blocks, limits.block_size)
    flights: list[tuple[Plan, StepResult]] = []
    outputs: dict[int, list[int]] = {}
    ended: dict[int, str] = {}
    requests: dict[int, Request] = {}
    now, handle = 0.0, 0
    for step in range(6000):
        now += rng.choice([0.0, 0.1, 3.0])
        if step < 60 and rng.random() < 0.5:
            handle += 1
            requests[handle] = _random_request(rng, handle, now, limits.context_length)
            assert scheduler.refusal(requests[handle]) is None
            scheduler.add(requests[handle])
            outputs[handle] = []
        if rng.random() < 0.08 and requests:
            victim = rng.choice(list(requests))
            if scheduler.cancel(victim):
                ended[victim] = "cancelled"
        plan = scheduler.plan(now)
        assert plan.num_tokens <= limits.max_num_batched_tokens
        scheduler.verify()
        memory.load(plan)
        if plan.rows and step < 60 and rng.random() < 0.03:  # it fails, perhaps before its adapters were loaded
            for h in scheduler.suspect([plan, *(flight for flight, _ in flights)]):
                ended[h] = "error"
            flights.clear()
            device.adapters |= {slot: -1 for slot, _ in plan.adapter_loads}
            scheduler.verify()
            continue
        if plan.rows:
            flights.append((plan, device.run(plan)))
        while len(flights) > (lag if plan.rows else 0):
            outcome = scheduler.commit(*flights.pop(0))
            for h, token in zip(outcome.handles, outcome.tokens, strict=True):
                assert h not in ended, "a token after the end"
                outputs[h].append(token)
            for h, (reason, _) in outcome.finished.items():
                ended[h] = reason
            scheduler.verify()
        if step >= 60 and scheduler.idle and not flights:
            break
    assert scheduler.idle, "a request starved"
    assert set(ended) == set(requests)
    assert pool.num_available == num_blocks, "a block leaked"
    pool.verify([])
    scheduler.slots.settle()
    assert not memory.wanted, "an adapter is kept in memory for no sequence"
    for h, request in requests.items():
        if ended[h] == "length":
            assert len(outputs[h]) == request.config.max_length
        if ended[h] == "stop":
            assert outputs[h][-1] == EOS
        if not request.config.early_stopping:
            assert ended[h] in ("length", "cancelled", "error")


@pytest.mark.parametrize("lag", [0, 1])
def test_a_tight_pool_preempts_and_still_finishes_everyone(lag: int) -> None:
    limits = SchedulerLimits(
        max_num_seqs=4, max_num_batched_tokens=64, context_length=40, block_size=4, long_prefill_tokens=64
    )
    pool = BlockPool(12)
    scheduler = Scheduler(limits, pool, [EOS])
    device = Device(12, 4)
    device.rng.choice = lambda options: 1  # type: ignore[method-assign,assignment]
    for h in range(6):
        config = ResolvedConfig(max_length=20)
        scheduler.add(Request(handle=h, prompt=[1 + h % 4] * 12, config=config, arrived_s=float(h)))
    flights: list[tuple[Plan, StepResult]] = []
    finished: dict[int, tuple[str, int | None]] = {}
    for _ in range(500):
        plan = scheduler.plan(0.0)
        if plan.rows:
            flights.append((plan, device.run(plan)))
        while len(flights) > (lag if plan.rows else 0):
            finished |= scheduler.commit(*flights.pop(0)).finished
            scheduler.verify()
        if scheduler.idle and not flights:
            break
    assert scheduler.num_preemptions > 0
    assert finished == dict.fromkeys(range(6), ("length", None))
    assert pool.num_available == 12
