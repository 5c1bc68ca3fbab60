"""`OptimizationLevel` and the engine settings that each level stands for, on a CPU and on a GPU.

Does: hold the table. Does not: decide what an explicit setting changes (`optimization_config.py`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from tonle.config.engine import GIB

MIB = 2**20


class OptimizationLevel(enum.Enum):
    """What matters most. Each level is a row of `PRESETS`."""

    CONSERVATIVE = "conservative"
    BALANCED = "balanced"
    AGGRESSIVE = "aggressive"
    MEMORY_OPTIMIZED = "memory_optimized"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One level. Settings are fields of `EngineConfig`; a pair is (on a CPU, on a GPU)."""

    purpose: str
    enable_parallel_sampling: bool
    max_batch_size: tuple[int, int]
    max_num_batched_tokens: tuple[int, int]
    memory_pool_size: tuple[int, int | None]  # bytes; None = all that is free, to 90 % of the GPU
    kv_cache_dtype: tuple[str, str] = ("auto", "auto")  # fp8: only where the GPU has it
    activation_bits: tuple[int, int] = (8, 8)

    def value(self, name: str, *, gpu: bool) -> Any:
        found = getattr(self, name)
        return found[gpu] if isinstance(found, tuple) else found


PRESETS = {
    OptimizationLevel.CONSERVATIVE: Preset(
        purpose="Small and predictable beside other work: one continuation per prompt, small steps, exact arithmetic.",
        enable_parallel_sampling=False,
        max_batch_size=(8, 16),
        max_num_batched_tokens=(256, 1024),
        memory_pool_size=(512 * MIB, GIB),
        activation_bits=(16, 16),
    ),
    OptimizationLevel.BALANCED: Preset(
        purpose="Good throughput, and the best of several candidates.",
        enable_parallel_sampling=True,
        max_batch_size=(32, 64),
        max_num_batched_tokens=(512, 4096),
        memory_pool_size=(GIB, 4 * GIB),
    ),
    OptimizationLevel.AGGRESSIVE: Preset(
        purpose="Most tokens per second; the machine is ours. Arithmetic is a little less exact: some answers change.",
        enable_parallel_sampling=True,
        max_batch_size=(64, 256),
        max_num_batched_tokens=(1024, 8192),
        memory_pool_size=(2 * GIB, None),
        kv_cache_dtype=("auto", "fp8"),
    ),
    OptimizationLevel.MEMORY_OPTIMIZED: Preset(
        purpose="Least memory: a small KV cache, few sequences at a time, small steps, one continuation per prompt.",
        enable_parallel_sampling=False,
        max_batch_size=(4, 8),
        max_num_batched_tokens=(128, 512),
        memory_pool_size=(256 * MIB, 512 * MIB),
        kv_cache_dtype=("auto", "fp8"),
    ),
}
