"""Advice rests on what was recorded, and says so when that is too little."""

from __future__ import annotations

from tonle.dynamic_batching import BatchingConfig, BatchingOptimizer, BatchingStrategy, DynamicBatcher, MemoryEstimator

ESTIMATOR = MemoryEstimator(64, 2, 4, dtype="float32", is_gated=False, keeps_kv=False)
LENGTHS = [(7 * number * number + 3 * number) % 499 + 1 for number in range(320)]


def run(optimizer: BatchingOptimizer, strategy: BatchingStrategy, *, max_batch_size: int = 8) -> None:
    """Compute nothing: a batch takes 1 ms and 10 µs per padded token."""
    batcher = DynamicBatcher(BatchingConfig(strategy=strategy, max_batch_size=max_batch_size), ESTIMATOR)
    batcher.add_items([(None, length) for length in LENGTHS])
    while len(batcher):
        _, info = batcher.get_next_batch()
        optimizer.record(info, 0.001 + 0.00001 * info.padded_tokens)


def test_nothing_is_claimed_from_nothing() -> None:
    found = BatchingOptimizer().get_recommendations()
    assert found["best_strategy"] == "none yet"
    assert found["suggestions"] == ["0 batches are recorded; 10 of one strategy are needed"]


def test_the_best_of_several_strategies_is_the_one_that_was_fastest() -> None:
    optimizer = BatchingOptimizer(BatchingConfig(max_batch_size=8))
    for strategy in (BatchingStrategy.NAIVE, BatchingStrategy.BUCKETED, BatchingStrategy.MEMORY_AWARE):
        run(optimizer, strategy)
    found = optimizer.get_recommendations()
    rates = {name: row["tokens_per_s"] for name, row in found["evidence"]["measured"].items()}
    assert found["best_strategy"] == max(rates, key=lambda name: rates[name]) == "MEMORY_AWARE"
    assert rates["NAIVE"] < rates["BUCKETED"]


def test_one_strategy_alone_is_compared_by_replaying_its_items() -> None:
    optimizer = BatchingOptimizer(BatchingConfig(max_batch_size=8))
    run(optimizer, BatchingStrategy.NAIVE)
    found = optimizer.get_recommendations()
    only, advice = found["suggestions"]
    assert only == "only NAIVE was measured; record batches of other strategies to compare them"
    assert "of the computed tokens is padding; MEMORY_AWARE would pad" in advice
    cost = found["evidence"]["cost"]
    assert abs(cost["fixed_s"] - 0.001) < 1e-6 and abs(cost["token_s"] - 0.00001) < 1e-8
    predicted = found["evidence"]["predicted"]
    assert predicted["MEMORY_AWARE"]["seconds"] < predicted["NAIVE"]["seconds"]


def test_small_batches_with_a_high_fixed_cost_are_noticed() -> None:
    optimizer = BatchingOptimizer(BatchingConfig(max_batch_size=32))
    for length in range(10, 60):
        batcher = DynamicBatcher(BatchingConfig(), ESTIMATOR)
        batcher.add_items([(None, length)] * 2)
        _, info = batcher.get_next_batch()
        optimizer.record(info, 0.010 + 0.00001 * info.padded_tokens)
    found = optimizer.get_recommendations()
    assert any("raise batch_timeout_ms" in sentence for sentence in found["suggestions"])
