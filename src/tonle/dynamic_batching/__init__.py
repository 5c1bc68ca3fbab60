"""Batches for models that cannot batch continuously by themselves: encoders, speech, images.

    from tonle.dynamic_batching import BatchingConfig, BatchingStrategy, DynamicBatcher, MemoryEstimator

    estimator = MemoryEstimator(model_hidden_size=768, num_layers=12, num_heads=12)
    batcher = DynamicBatcher(BatchingConfig(strategy=BatchingStrategy.MEMORY_AWARE), estimator)
    batcher.add_items([("a short text", 4), ("a longer text", 90)])
    batch, batch_info = batcher.get_next_batch()

Needs no torch. The engine has a scheduler of its own (`engine/schedule/`) and does not use this.
"""

from __future__ import annotations

from tonle.dynamic_batching.batch import Batch, BatchInfo
from tonle.dynamic_batching.batcher import DynamicBatcher
from tonle.dynamic_batching.batching_config import BatchingConfig, BatchingStrategy
from tonle.dynamic_batching.batching_optimizer import BatchingOptimizer
from tonle.dynamic_batching.memory_estimator import MemoryEstimator

__all__ = [
    "Batch",
    "BatchInfo",
    "BatchingConfig",
    "BatchingOptimizer",
    "BatchingStrategy",
    "DynamicBatcher",
    "MemoryEstimator",
]
