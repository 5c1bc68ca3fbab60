"""`Capacity`: what is left for keys and values once the weights are in memory, in tokens and in users.

Does: arithmetic of memory. Does not: know speed.
"""

from __future__ import annotations

import math

import msgspec

from tonle.advise.roofline import RooflineTimes
from tonle.advise.units import GIB, bytes_text
from tonle.advise.workload import Workload
from tonle.config.engine import EngineConfig

MEMORY_SHARE = EngineConfig().gpu_memory_utilization  # vLLM's default is the same
RESERVE_BYTES = 2 * GIB  # of each GPU: CUDA's context, graphs, activations of a step
BLOCK = EngineConfig().block_size
MIN_USERS = 8  # fewer in one batch read all weights for too few tokens
_SAFE = 1.645  # standard deviations: in 95 of 100 moments what runs fits


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Of one replica with all its GPUs."""

    usable_bytes: int  # of each GPU, after the share and the reserve
    weight_bytes: int  # on each GPU
    kv_bytes_per_token: int  # over all GPUs, copies of KV heads included
    kv_tokens: int  # that fit; 0: not even the weights do
    users_mean: int  # requests of average size at a time
    users_p95: int  # if each were as long as the longest twentieth
    users_safe: int  # of this mix, so that 95 of 100 moments fit

    @property
    def weights_fit(self) -> bool:
        return self.weight_bytes < self.usable_bytes


def capacity_of(times: RooflineTimes, workload: Workload) -> Capacity:
    gpus, shape = times.gpus, times.shape
    usable = int(times.gpu.memory_bytes * MEMORY_SHARE) - RESERVE_BYTES
    weights = math.ceil(shape.weight_bytes(times.precision) / gpus)
    copies = max(1, gpus // shape.kv_heads)  # GPUs beyond the number of KV heads hold the same ones again
    per_token = shape.kv_bytes_per_token(times.kv) * copies
    tokens = max(0, (usable - weights) * gpus // per_token) // BLOCK * BLOCK
    return Capacity(
        usable_bytes=usable,
        weight_bytes=weights,
        kv_bytes_per_token=per_token,
        kv_tokens=tokens,
        users_mean=math.floor(max(0, tokens - workload.shared_prefix) / workload.held_mean),
        users_p95=max(0, tokens - workload.shared_prefix) // (workload.total_at(95) - workload.shared_prefix),
        users_safe=_safe_users(tokens, workload),
    )


def _safe_users(tokens: int, workload: Workload) -> int:
    """The most n with n·mean + 1.645·√n·spread ≤ tokens: a quadratic equation in √n."""
    if tokens < workload.longest:
        return 0
    tokens -= workload.shared_prefix
    mean, spread = workload.held_mean, _SAFE * workload.held_spread
    root = (-spread + math.sqrt(spread * spread + 4 * mean * tokens)) / (2 * mean)
    return max(1, math.floor(root * root))


def memory_text(capacity: Capacity, times: RooflineTimes) -> str:
    """The arithmetic of one GPU's memory."""
    gpu = times.gpu
    return (
        f"{bytes_text(gpu.memory_bytes)} × {MEMORY_SHARE:g} − {bytes_text(RESERVE_BYTES)} for graphs and activations = "
        f"{bytes_text(capacity.usable_bytes)} per GPU, weights {bytes_text(capacity.weight_bytes)}"
    )
