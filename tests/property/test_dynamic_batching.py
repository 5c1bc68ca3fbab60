"""Any interleaving of adds, cancels, deadlines, batches, joins and finishes: each item leaves exactly once, limits hold,
and none starves."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tonle.dynamic_batching import Batch, BatchInfo, BatchingConfig, BatchingStrategy, DynamicBatcher, MemoryEstimator
from tonle.dynamic_batching import batcher as batcher_module

LENGTHS = st.integers(1, 600)
ESTIMATOR = MemoryEstimator(64, 2, 4, dtype="float32", is_gated=False, keeps_kv=False)
MAX_TOKENS, MAX_ITEMS, BUCKET = 1200, 6, 100
MAX_MB = ESTIMATOR.estimate_mb(3, 600)


class Clock:
    """Time that only the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class BatcherMachine(RuleBasedStateMachine):
    strategy = BatchingStrategy.NAIVE

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.real_time, batcher_module.time = batcher_module.time, self.clock  # type: ignore[attr-defined]
        self.batcher = DynamicBatcher(
            BatchingConfig(
                strategy=self.strategy, max_batch_size=MAX_ITEMS, max_total_tokens=MAX_TOKENS, bucket_size=BUCKET,
                memory_limit_mb=MAX_MB, priority_ageing_s=3.0,
            ),
            ESTIMATOR,
        )  # fmt: skip
        self.waiting: dict[int, int] = {}  # id → length; the request is the id's place in `all_ids`
        self.names: dict[int, str] = {}
        self.left: list[str] = []  # how each item left: in a batch, expired or cancelled
        self.added = 0
        self.deadlines: dict[str, float] = {}
        self.keys: dict[str, tuple[float, int]] = {}  # arrival with ageing: the lowest is the most urgent
        self.live: list[tuple[Batch, dict[int, str]]] = []

    def teardown(self) -> None:
        batcher_module.time = self.real_time  # type: ignore[attr-defined]

    @rule(length=LENGTHS, priority=st.integers(0, 3), deadline=st.none() | st.integers(0, 5000))
    def add(self, length: int, priority: int, deadline: int | None) -> None:
        name = f"item-{self.added}/{length}"
        self.added += 1
        item_id = self.batcher.add_item(name, length, priority=priority, deadline_ms=deadline)
        self.waiting[item_id] = length
        self.names[item_id] = name
        self.keys[name] = (self.clock.now_s + 3.0 * priority, item_id)
        if deadline is not None:
            self.deadlines[name] = self.clock.now_s + deadline / 1000

    @rule(lengths=st.lists(LENGTHS, max_size=12))
    def add_many(self, lengths: list[int]) -> None:
        names = [f"item-{self.added + place}/{length}" for place, length in enumerate(lengths)]
        self.added += len(names)
        for item_id, name, length in zip(
            self.batcher.add_items(zip(names, lengths, strict=True)), names, lengths, strict=True
        ):
            self.waiting[item_id], self.names[item_id] = length, name
            self.keys[name] = (self.clock.now_s + 3.0 * 2, item_id)

    @rule(seconds=st.floats(0, 4))
    def time_passes(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        item_id = data.draw(st.sampled_from(sorted(self.waiting)))
        if self.batcher.cancel(item_id):
            self._leave(self.names[item_id])
        assert not self.batcher.cancel(item_id)

    @rule()
    def next_batch(self) -> None:
        alive = [
            name
            for name in self.keys
            if name not in self.left and self.deadlines.get(name, float("inf")) > self.clock.now_s
        ]
        batch, info = self.batcher.get_next_batch()
        self._note(list(batch), info)
        if len(batch):
            assert min(alive, key=self.keys.__getitem__) in list(batch), "so none starves"
            self.live.append((batch, dict(zip(batch.slots(), batch, strict=True))))
        else:
            assert not len(self.batcher), "items wait and the batch is empty"

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        batch, names = data.draw(st.sampled_from(self.live))
        slot = data.draw(st.sampled_from(sorted(names)))
        assert batch.finish(slot) == names.pop(slot)
        with pytest.raises(IndexError):
            batch[slot]
        if not names:
            self.live.remove((batch, names))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        batch, names = data.draw(st.sampled_from(self.live))
        longest = max(_length(name) for name in names.values())
        joined = batch.join()
        for slot in joined:
            assert slot not in names
            names[slot] = batch[slot]
            self._leave(batch[slot])
        lengths = [_length(name) for name in names.values()]
        self._check_limits(lengths, max(longest, *lengths))

    def _note(self, names: list[str], info: BatchInfo) -> None:
        for name in (*names, *info.expired):
            self._leave(name)
        for name in info.expired:
            assert self.deadlines[name] <= self.clock.now_s
        for name in names:
            assert self.deadlines.get(name, float("inf")) > self.clock.now_s
        lengths = [_length(name) for name in names]
        assert (info.size, list(info.lengths), info.real_tokens) == (len(names), lengths, sum(lengths))
        if lengths:
            self._check_limits(lengths, max(lengths))
            assert info.padded_length == max(lengths)
            assert 0 <= info.padding_waste < 1
        if self.strategy is BatchingStrategy.BUCKETED and lengths:
            assert max(lengths) - min(lengths) < BUCKET

    def _check_limits(self, lengths: list[int], longest: int) -> None:
        assert len(lengths) <= MAX_ITEMS
        if self.strategy is BatchingStrategy.CONTINUOUS:
            assert sum(lengths) <= MAX_TOKENS
            assert sum(ESTIMATOR.sequence_mb(length) for length in lengths) <= MAX_MB * (1 + 1e-9)
        else:
            assert len(lengths) * longest <= MAX_TOKENS
            assert ESTIMATOR.estimate_mb(len(lengths), longest) <= MAX_MB * (1 + 1e-9)

    def _leave(self, name: str) -> None:
        assert name not in self.left, f"{name} left twice"
        self.left.append(name)
        for item_id, other in self.names.items():
            if other == name:
                self.waiting.pop(item_id, None)

    @invariant()
    def nothing_is_lost(self) -> None:
        expired = [name for name, s in self.deadlines.items() if s <= self.clock.now_s and name not in self.left]
        assert self.added - len(self.left) - len(expired) <= len(self.batcher) <= self.added - len(self.left)


def _length(name: str) -> int:
    return int(name.rpartition("/")[2])


def _machine(chosen: BatchingStrategy) -> Any:
    machine = type(f"{chosen.name}Machine", (BatcherMachine,), {"strategy": chosen})
    case = machine.TestCase
    case.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
    return case


TestNaive = _machine(BatchingStrategy.NAIVE)
TestBucketed = _machine(BatchingStrategy.BUCKETED)
TestMemoryAware = _machine(BatchingStrategy.MEMORY_AWARE)
TestContinuous = _machine(BatchingStrategy.CONTINUOUS)


@pytest.mark.parametrize("strategy", BatchingStrategy, ids=lambda strategy: strategy.name)
def test_the_most_urgent_item_is_in_the_next_batch(strategy: BatchingStrategy) -> None:
    """So that a stream of items that fit together better cannot keep an odd one waiting."""
    batcher = DynamicBatcher(BatchingConfig(strategy=strategy, max_batch_size=4), ESTIMATOR)
    batcher.add_item("odd", 600)
    for round_number in range(20):
        batcher.add_items([(f"{round_number}-{place}", 10) for place in range(8)])
        batch, _ = batcher.get_next_batch()
        if "odd" in list(batch):
            assert round_number == 0
            return
    raise AssertionError("it starved")


@pytest.mark.parametrize("strategy", BatchingStrategy, ids=lambda strategy: strategy.name)
def test_threads_share_a_batcher_without_losing_or_doubling_an_item(strategy: BatchingStrategy) -> None:
    batcher = DynamicBatcher(BatchingConfig(strategy=strategy, max_batch_size=8, batch_timeout_ms=1), ESTIMATOR)
    got: list[str] = []
    lock = threading.Lock()

    def produce(producer: int) -> None:
        for number in range(300):
            batcher.add_item(f"{producer}-{number}", 1 + (number * 37) % 500)

    def consume() -> None:
        while not batcher.closed:
            batch, info = batcher.get_next_batch(timeout_ms=20)
            with lock:
                got.extend(batch)
                got.extend(info.expired)

    consumers = [threading.Thread(target=consume) for _ in range(3)]
    producers = [threading.Thread(target=produce, args=(number,)) for number in range(4)]
    for thread in (*consumers, *producers):
        thread.start()
    for thread in producers:
        thread.join(120)
    batcher.close()
    for thread in consumers:
        thread.join(120)
    assert sorted(got) == sorted(f"{producer}-{number}" for producer in range(4) for number in range(300))
