"""What each strategy does with the same items, and what callers are told."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest

from tonle.dynamic_batching import BatchingConfig, BatchingStrategy, DynamicBatcher, MemoryEstimator
from tonle.errors import ConfigError, InvalidRequest

ESTIMATOR = MemoryEstimator(64, 2, 4, dtype="float32", is_gated=False, keeps_kv=False)
MIXED = [("a", 10), ("b", 500), ("c", 12), ("d", 480), ("e", 11), ("f", 300)]


def batches(strategy: BatchingStrategy, **limits: float) -> list[list[str]]:
    batcher = DynamicBatcher(BatchingConfig(strategy=strategy, **limits), ESTIMATOR)  # type: ignore[arg-type]
    batcher.add_items(MIXED)
    found = []
    while len(batcher):
        batch, _ = batcher.get_next_batch()
        found.append(list(batch))
    return found


def test_naive_takes_items_as_they_came() -> None:
    assert batches(BatchingStrategy.NAIVE, max_batch_size=3) == [["a", "b", "c"], ["d", "e", "f"]]


def test_bucketed_takes_items_of_one_bucket() -> None:
    found = batches(BatchingStrategy.BUCKETED, max_batch_size=3)
    assert found == [["a", "c", "e"], ["b", "d"], ["f"]]


def test_memory_aware_takes_neighbours_of_the_most_urgent_item() -> None:
    found = batches(BatchingStrategy.MEMORY_AWARE, max_batch_size=3)
    assert [sorted(batch) for batch in found] == [["a", "c", "e"], ["b", "d", "f"]]


def test_memory_aware_stops_at_the_memory_limit() -> None:
    limit = ESTIMATOR.estimate_mb(2, 500)
    batcher = DynamicBatcher(BatchingConfig(memory_limit_mb=limit), ESTIMATOR)
    batcher.add_items([(number, 500) for number in range(5)])
    sizes = []
    while len(batcher):
        _, info = batcher.get_next_batch()
        assert info.estimated_mb is not None and info.estimated_mb <= limit
        sizes.append(info.size)
    assert sizes == [2, 2, 1]


def test_continuous_pads_nothing_and_lets_items_join_where_others_left() -> None:
    config = BatchingConfig(strategy=BatchingStrategy.CONTINUOUS, max_batch_size=2)
    batcher = DynamicBatcher(config)
    batcher.add_items(MIXED)
    batch, info = batcher.get_next_batch()
    assert (list(batch), info.padded_tokens, info.padding_waste) == (["a", "b"], 510, 0.0)
    assert batch.join() == []
    assert batch.finish(0) == "a"
    assert batch.join() == [0]
    assert (batch[0], batch.slots(), list(batch)) == ("c", [0, 1], ["c", "b"])


def test_a_padded_batch_takes_no_longer_item_while_it_runs() -> None:
    batcher = DynamicBatcher(BatchingConfig(strategy=BatchingStrategy.NAIVE, max_batch_size=2))
    batcher.add_items([("a", 10), ("b", 20), ("too long", 21)])
    batch, _ = batcher.get_next_batch()
    batch.finish(0)
    assert batch.join() == []
    batch.finish(1)
    assert [batch[slot] for slot in batch.join()] == ["too long"]


def test_without_continuous_batching_a_batch_stays_as_it_was_formed() -> None:
    batcher = DynamicBatcher(
        BatchingConfig(strategy=BatchingStrategy.NAIVE, max_batch_size=1, enable_continuous_batching=False)
    )
    batcher.add_items([("a", 10), ("b", 10)])
    batch, _ = batcher.get_next_batch()
    batch.finish(0)
    assert batch.join() == []
    assert len(batcher) == 1


def test_priorities_go_first_and_deadlines_expire() -> None:
    batcher = DynamicBatcher(BatchingConfig(strategy=BatchingStrategy.NAIVE, max_batch_size=1))
    batcher.add_item("normal", 5)
    batcher.add_item("late", 5, deadline_ms=0)
    batcher.add_item("urgent", 5, priority=0)
    batch, info = batcher.get_next_batch()
    assert (list(batch), info.expired) == (["urgent"], ("late",))
    assert list(batcher.get_next_batch()[0]) == ["normal"]


def test_a_batch_waits_until_it_is_full() -> None:
    batcher = DynamicBatcher(BatchingConfig(strategy=BatchingStrategy.NAIVE, max_batch_size=2, batch_timeout_ms=60_000))
    batcher.add_item("a", 5)
    assert not len(batcher.get_next_batch()[0])
    threading.Timer(0.05, batcher.add_item, ("b", 5)).start()
    batch, _ = batcher.get_next_batch(timeout_ms=30_000)
    assert list(batch) == ["a", "b"]


def test_closing_wakes_who_waits_and_lets_the_rest_out() -> None:
    batcher = DynamicBatcher(BatchingConfig(strategy=BatchingStrategy.NAIVE, max_batch_size=2, batch_timeout_ms=60_000))
    batcher.add_item("a", 5)
    threading.Timer(0.05, batcher.close).start()
    batch, _ = batcher.get_next_batch(timeout_ms=30_000)
    assert list(batch) == ["a"]
    assert batcher.closed
    with pytest.raises(InvalidRequest, match="was closed"):
        batcher.add_item("b", 5)


def test_an_item_that_no_batch_can_hold_is_refused_at_once() -> None:
    batcher = DynamicBatcher(BatchingConfig(max_total_tokens=100, memory_limit_mb=1), ESTIMATOR)
    with pytest.raises(InvalidRequest, match="max_total_tokens is 100"):
        batcher.add_items([("fine", 10), ("long", 101)])
    assert not len(batcher), "all of them or none"
    with pytest.raises(InvalidRequest, match="seq_len must be an integer of at least 1, not 0"):
        batcher.add_item("empty", 0)
    heavy = DynamicBatcher(BatchingConfig(memory_limit_mb=0.01), ESTIMATOR)
    with pytest.raises(InvalidRequest, match=r"needs about \d+ MB, and memory_limit_mb is 0.01"):
        heavy.add_item("heavy", 5000)


@pytest.mark.parametrize("item", ["abc", "ab", ("a",), ("a", 1, 2), 5])
def test_items_are_pairs(item: Any) -> None:
    batcher = DynamicBatcher(BatchingConfig(), ESTIMATOR)
    with pytest.raises(TypeError, match=r"add_items takes pairs \(request, length in tokens\)"):
        batcher.add_items([("fine", 10), item])
    assert not len(batcher)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="MEMORY_AWARE needs a memory estimator"):
        DynamicBatcher()
    with pytest.raises(ConfigError, match="strategy must be one of NAIVE, BUCKETED, MEMORY_AWARE, CONTINUOUS"):
        DynamicBatcher(BatchingConfig(strategy="fast"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_batch_size must be an integer of at least 1, not 0"):
        DynamicBatcher(BatchingConfig(max_batch_size=0), ESTIMATOR)
    with pytest.raises(ConfigError, match="CONTINUOUS needs enable_continuous_batching"):
        DynamicBatcher(BatchingConfig(strategy=BatchingStrategy.CONTINUOUS, enable_continuous_batching=False))


def test_cancelled_items_do_not_pile_up() -> None:
    batcher = DynamicBatcher(BatchingConfig(), ESTIMATOR)
    for number in range(20_000):
        batcher.cancel(batcher.add_item(number, 1 + number % 500, deadline_ms=60_000))
    assert len(batcher._waiting._by_urgency) < 3_000
    assert len(batcher._deadlines) < 3_000


def test_it_needs_no_torch() -> None:
    code = "import sys, tonle.dynamic_batching; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_event_loop_is_told_when_to_look_again() -> None:
    batcher = DynamicBatcher(
        BatchingConfig(strategy=BatchingStrategy.NAIVE, max_batch_size=2, batch_timeout_ms=3_600_000)
    )
    assert batcher.ready_in_s() is None
    first = batcher.add_item("a", 1)
    assert 3000 < (batcher.ready_in_s() or 0) <= 3600 and len(batcher.get_next_batch()[0]) == 0
    batcher.add_item("b", 1, deadline_ms=60_000)
    assert batcher.ready_in_s() == 0  # full
    batcher.cancel(first)
    assert 50 < (batcher.ready_in_s() or 0) <= 60  # until it expires
    batcher.close()
    assert batcher.ready_in_s() == 0 and list(batcher.get_next_batch()[0]) == ["b"]
