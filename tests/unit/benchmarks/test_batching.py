"""The strategies' benchmark: ragged and padded batches mean the same, and ratios are taken within a repeat."""

from __future__ import annotations

import pytest
from benchmarks.batching import Run, encoder, largest_difference, ratios, run_once, texts

from tonle.dynamic_batching import BatchingStrategy


def test_ragged_and_padded_batches_embed_alike() -> None:
    assert largest_difference(encoder(), texts(6, seed=3)) < 1e-4


@pytest.mark.parametrize("strategy", BatchingStrategy)
def test_each_text_is_embedded_once(strategy: BatchingStrategy) -> None:
    items = texts(40, seed=1)
    run = run_once(encoder(), strategy, items, memory_mb=64.0)
    assert len(run.waits_s) == 40 and run.real_tokens == sum(map(len, items))
    assert (run.padding_waste == 0) == (strategy is BatchingStrategy.CONTINUOUS)
    assert 0 < run.estimated_mb <= 64


def test_ratios_compare_runs_of_the_same_repeat() -> None:
    naive = [Run(seconds=10.0), Run(seconds=40.0), Run(seconds=10.0)]  # the machine was busy in the second repeat
    runs = {
        BatchingStrategy.NAIVE: naive,
        BatchingStrategy.CONTINUOUS: [Run(seconds=base.seconds / 4) for base in naive],
    }
    assert ratios(runs) == {BatchingStrategy.NAIVE: 1.0, BatchingStrategy.CONTINUOUS: 4.0}
