"""`resources_for`: what a pod needs to serve a model: cores, memory, GPUs; or why it cannot.

Does: arithmetic over a model's size and the server's settings. Does not: look at a cluster or at this machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tonle.config.deploy import DeployConfig
from tonle.config.serve import ServeConfig
from tonle.deploy.gpus import Gpu, find_gpu
from tonle.deploy.model_size import ModelSize
from tonle.errors import ConfigError

GIB = 1024**3
_GPU_OVERHEAD_BYTES = 2 * GIB  # CUDA context, activations of a step, captured graphs
_PROCESS_BYTES = GIB  # two Python processes with torch
_CPU_KV_BYTES = 640 * 1024**2  # the engine's default on a CPU
_GPU_HOST_BYTES = 4 * GIB  # besides the weights, which are read through the page cache


@dataclass(frozen=True, slots=True)
class Resources:
    cpu: int  # cores
    memory_bytes: int
    gpu: Gpu | None
    gpus: int  # 0 without one
    reason: str  # how the numbers came about, one line


def resources_for(size: ModelSize, serve: ServeConfig, deploy: DeployConfig) -> Resources:
    """Raises `ConfigError` if the model cannot run there."""
    context = serve.max_model_len or size.max_positions
    if deploy.gpu is None:
        return _on_cpu(size, serve, deploy)
    gpu = find_gpu(deploy.gpu)
    kv_bytes = context * size.kv_bytes_per_token // (2 if serve.kv_cache_dtype == "fp8" else 1)
    need = size.weight_bytes + kv_bytes
    have = deploy.gpus * (gpu.memory_bytes * serve.gpu_memory_utilization - _GPU_OVERHEAD_BYTES)
    if need > have:
        _refuse(size, deploy, gpu, kv_bytes, context, have)
    memory = deploy.memory_bytes or _rounded(size.weight_bytes + _GPU_HOST_BYTES)
    _check_memory(memory, size.weight_bytes // 4 + _PROCESS_BYTES, "a process that loads this model")
    reason = (
        f"{_gib(size.weight_bytes)} of weights ({size.origin}), {_gib(round(have - size.weight_bytes))} left for keys "
        f"and values on {deploy.gpus} × {gpu.name}: {round((have - size.weight_bytes) / kv_bytes)} requests of {context:,} tokens"
    )
    return Resources(deploy.cpu or 4, memory, gpu, deploy.gpus, reason)


def _on_cpu(size: ModelSize, serve: ServeConfig, deploy: DeployConfig) -> Resources:
    if serve.kv_cache_dtype == "fp8":
        raise ConfigError("kv_cache_dtype: fp8 needs a GPU; set gpu, or leave it auto", param="kv_cache_dtype")
    kv_bytes = serve.kv_cache_memory_bytes or _CPU_KV_BYTES
    need = round(size.weight_bytes * 1.1) + kv_bytes + _PROCESS_BYTES
    memory = deploy.memory_bytes or _rounded(need)
    _check_memory(memory, need, f"{_gib(size.weight_bytes)} of weights and {_gib(kv_bytes)} of keys and values")
    reason = f"{_gib(size.weight_bytes)} of weights ({size.origin}), {_gib(kv_bytes)} of keys and values, on a CPU"
    return Resources(deploy.cpu or 2, memory, None, 0, reason)


def _refuse(size: ModelSize, deploy: DeployConfig, gpu: Gpu, kv_bytes: int, context: int, have: float) -> None:
    each = (size.weight_bytes + kv_bytes) / deploy.gpus
    raise ConfigError(
        f"the model does not fit: {_gib(size.weight_bytes)} of weights ({size.origin}) and {_gib(kv_bytes)} for one request "
        f"of {context:,} tokens are more than the {_gib(max(0, round(have)))} that {deploy.gpus} × {gpu.name} leave. "
        f"Choose a GPU with more than {_gib(round(each + _GPU_OVERHEAD_BYTES))}, more gpus, a smaller max_model_len, or "
        "kv_cache_dtype: fp8",
        param="gpu",
    )


def _check_memory(memory: int, need: int, what: str) -> None:
    if memory < need:
        raise ConfigError(f"memory is {_gib(memory)}, but {what} need {_gib(need)}", param="memory")


def _rounded(num_bytes: int) -> int:
    """Up to whole GiB."""
    return math.ceil(num_bytes / GIB) * GIB


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3g} GiB"
