"""`PerformanceOptimizer`: `model.generate` of transformers, on our engine. Token ids in, token ids and statistics out.

    import torch
    from tonle.performance_optimizer import OptimizationConfig, OptimizationLevel, PerformanceOptimizer

    config = OptimizationConfig(level=OptimizationLevel.BALANCED, num_parallel_samples=4)
    with PerformanceOptimizer(model, config) as optimizer:  # a live transformers model, a path, or None
        output_ids, stats = optimizer.optimized_generate(torch.tensor([[1, 2, 3]]), max_length=50)
    print(stats)

Does: presets of engine settings, several candidates per prompt, padding as transformers has it, statistics. Does not:
compute anything; `tonle.engine` does. Runs in the caller's process.
"""

from __future__ import annotations

from tonle.performance_optimizer.levels import OptimizationLevel
from tonle.performance_optimizer.optimization_config import OptimizationConfig
from tonle.performance_optimizer.optimizer import PerformanceOptimizer
from tonle.performance_optimizer.stats import GenerationStats

__all__ = ["GenerationStats", "OptimizationConfig", "OptimizationLevel", "PerformanceOptimizer"]
