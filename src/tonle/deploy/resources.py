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
from tonle.deploy.units import GIB, MIB, gib, whole_gib
from tonle.errors import ConfigError

_LEAST_CONTEXT = 8192  # tokens of one request that must fit, unless max_model_len says otherwise
_GPU_OVERHEAD_BYTES = 2 * GIB  # CUDA context, activations of a step, captured graphs
# The first start on a node compiles kernels in a process of its own, while the server answers through torch. Measured with the
# default model and 16 requests: a peak of 1.9 GB, where the other terms come to 1.7 GiB.
_COMPILER_BYTES = GIB // 2
_CACHE_BYTES = 10 * GIB  # compiled kernels, and a second file while one is being fetched
# By engine.
_PROCESS_BYTES = {"tonle": GIB, "vllm": 4 * GIB}  # Python processes with torch
_CPU_KV_BYTES = {"tonle": 640 * MIB, "vllm": 4 * GIB}  # of KV cache on a CPU, unless kv_cache_memory is set
# The same with our engine where it is in int8 for certain: auto depends on the processor.
_CPU_INT8_KV_BYTES = 320 * MIB
_KV_BITS = {"float32": 32.0, "fp8": 8.0, "int8": 8.0}
# Of our engine, beside each number of 8 bits: a float32 for a head of a token, of 64 numbers; larger heads take less.
_SCALE_BITS = 0.5
_GPU_HOST_BYTES = {"tonle": 4 * GIB, "vllm": 8 * GIB}  # besides the weights, which are read through the page cache


@dataclass(frozen=True, slots=True)
class Resources:
    cpu: int  # cores
    cpu_limit: int | None
    memory_bytes: int
    memory_limit_bytes: int
    cache_bytes: int  # of disk, for compiled kernels
    fetch_bytes: int  # of disk, where the pod fetches its model itself: both
    gpu: Gpu | None
    gpus: int  # 0 without one
    kv_bytes: int  # of KV cache, all requests together
    reason: str  # how the numbers came about, one line


def resources_for(size: ModelSize, serve: ServeConfig, deploy: DeployConfig) -> Resources:
    """Raises `ConfigError` if the model cannot run there."""
    gpu = None if deploy.gpu is None else find_gpu(deploy.gpu)
    if gpu is None:
        kv_bytes, memory, reason = _on_cpu(size, serve, deploy)
    else:
        kv_bytes, memory, reason = _on_gpu(gpu, size, serve, deploy)
    most_cores = deploy.cpu_limit or 1024
    return Resources(
        cpu=deploy.cpu or min(4 if gpu else 2, most_cores),
        cpu_limit=deploy.cpu_limit,
        memory_bytes=memory,
        memory_limit_bytes=max(memory, deploy.memory_limit_bytes or 0),
        cache_bytes=deploy.model_cache_bytes or _CACHE_BYTES,
        fetch_bytes=deploy.model_cache_bytes or whole_gib(size.file_bytes + _CACHE_BYTES),
        gpu=gpu,
        gpus=deploy.gpus if gpu else 0,
        kv_bytes=kv_bytes,
        reason=reason,
    )


def _on_gpu(gpu: Gpu, size: ModelSize, serve: ServeConfig, deploy: DeployConfig) -> tuple[int, int, str]:
    """Bytes of KV cache, bytes of memory, and the reason."""
    if serve.device == "cpu":
        raise ConfigError(f"device: cpu does not go with gpu: {gpu.name}; remove one of them", param="device")
    if serve.kv_cache_dtype == "int8":
        raise ConfigError(
            "kv_cache_dtype: int8 is for CPUs; on a GPU set fp8, or leave it auto", param="kv_cache_dtype"
        )
    _check_float32(serve, deploy)
    if serve.kv_cache_dtype == "float32" and serve.dtype != "float32":
        raise ConfigError(
            "kv_cache_dtype: float32 on a GPU needs dtype: float32; set that, or leave kv_cache_dtype auto",
            param="kv_cache_dtype",
        )
    if serve.kv_cache_dtype == "fp8" and deploy.engine == "tonle" and not gpu.kernels:
        raise ConfigError(
            f"kv_cache_dtype: fp8 needs a GPU of compute capability 8.0 or newer with our engine, and {gpu.name} is older; "
            "leave it auto, or choose an A10G, L4 or newer",
            param="kv_cache_dtype",
        )
    context, each_bytes = _one_request(size, serve, deploy)
    have = round(deploy.gpus * (gpu.memory_bytes * serve.gpu_memory_utilization - _GPU_OVERHEAD_BYTES))
    left = serve.kv_cache_memory_bytes or have - size.weight_bytes
    if size.weight_bytes + max(each_bytes, serve.kv_cache_memory_bytes or 0) > have:
        _refuse_gpu(gpu, size, serve, deploy, have)
    _check_pool(serve, each_bytes, left)
    host_bytes = _GPU_HOST_BYTES[deploy.engine]
    if deploy.engine == "tonle":
        host_bytes += (deploy.gpus - 1) * _PROCESS_BYTES["tonle"]  # a process for each
    least = size.weight_bytes // 4 + _PROCESS_BYTES[deploy.engine]
    memory = _memory(deploy, size.weight_bytes + host_bytes, least, "loading this model takes")
    reason = (
        f"{gib(size.weight_bytes)} of weights ({size.origin}) on {_cards(gpu, deploy)} leave {gib(left)} for the KV cache: "
        f"{left // each_bytes:,} requests of {context:,} tokens"
    )
    return left, memory, reason


def _on_cpu(size: ModelSize, serve: ServeConfig, deploy: DeployConfig) -> tuple[int, int, str]:
    if serve.device.startswith("cuda"):
        raise ConfigError(f"device: {serve.device} needs a GPU; set gpu, for example gpu: A10G", param="device")
    if serve.kv_cache_dtype == "fp8":
        raise ConfigError(
            "kv_cache_dtype: fp8 needs a GPU; set gpu, for example gpu: L4, or leave it auto", param="kv_cache_dtype"
        )
    if serve.kv_cache_dtype == "int8" and deploy.engine != "tonle":
        raise ConfigError(
            "kv_cache_dtype: int8 is of our engine alone; leave it auto, or set engine: tonle", param="kv_cache_dtype"
        )
    _check_float32(serve, deploy)
    if serve.kv_cache_dtype != "auto" and serve.dtype in ("bfloat16", "float16"):
        raise ConfigError(
            f"kv_cache_dtype: {serve.kv_cache_dtype} on a CPU needs a model computed in float32; set dtype: float32, or leave "
            "kv_cache_dtype auto",
            param="kv_cache_dtype",
        )
    if deploy.engine == "vllm" and serve.max_model_len is None:
        raise ConfigError(
            "engine: vllm on a CPU needs max_model_len, because there it does not fit the context to the memory by itself; "
            "set it, for example max_model_len: 4096",
            param="max_model_len",
        )
    usual = _CPU_INT8_KV_BYTES if serve.kv_cache_dtype == "int8" else _CPU_KV_BYTES[deploy.engine]
    kv_bytes = serve.kv_cache_memory_bytes or usual
    _check_pool(serve, _one_request(size, serve, deploy)[1], kv_bytes)
    need = round(size.weight_bytes * 1.1) + kv_bytes + _PROCESS_BYTES[deploy.engine]
    parts = f"{gib(size.weight_bytes)} of weights ({size.origin}), {gib(kv_bytes)} of KV cache"
    memory = _memory(deploy, need + _COMPILER_BYTES, need, f"{parts} and the server itself take")
    server = f"{gib(_PROCESS_BYTES[deploy.engine])} for the server, {gib(_COMPILER_BYTES)} while it compiles kernels"
    return kv_bytes, memory, f"{parts}, {server}"


def _check_float32(serve: ServeConfig, deploy: DeployConfig) -> None:
    if serve.kv_cache_dtype == "float32" and deploy.engine != "tonle":
        raise ConfigError(
            "kv_cache_dtype: float32 is of our engine alone; leave it auto, or set engine: tonle",
            param="kv_cache_dtype",
        )


def _one_request(size: ModelSize, serve: ServeConfig, deploy: DeployConfig) -> tuple[int, int]:
    """Tokens of a request that must fit, and their bytes of KV cache."""
    context = serve.max_model_len or min(size.max_positions, _LEAST_CONTEXT)
    return context, max(1, math.ceil(context * size.kv_bytes_per_token * _kv_bits(serve, deploy) / 16))


def _kv_bits(serve: ServeConfig, deploy: DeployConfig) -> float:
    """Of a number in the KV cache, at most."""
    if serve.kv_cache_dtype != "auto":
        bits = _KV_BITS[serve.kv_cache_dtype]
        return bits + _SCALE_BITS if bits == 8 and deploy.engine == "tonle" else bits
    if serve.dtype != "auto":
        return 32 if serve.dtype == "float32" else 16
    # On a CPU our engine's auto is float32 or int8, by the processor: what fits in float32 fits in both.
    return 32 if deploy.gpu is None and deploy.engine == "tonle" else 16


def _check_pool(serve: ServeConfig, each_bytes: int, pool_bytes: int) -> None:
    if serve.max_model_len is not None and each_bytes > pool_bytes:
        raise ConfigError(
            f"max_model_len: one request of {serve.max_model_len:,} tokens takes {gib(each_bytes)} of KV cache, more than the "
            f"{gib(pool_bytes)} for all of them; set a larger kv_cache_memory, or a smaller max_model_len",
            param="max_model_len",
        )


def _refuse_gpu(gpu: Gpu, size: ModelSize, serve: ServeConfig, deploy: DeployConfig, have: int) -> None:
    context, each_bytes = _one_request(size, serve, deploy)
    kv_bytes = max(each_bytes, serve.kv_cache_memory_bytes or 0)
    what = f"one request of {context:,} tokens" if kv_bytes == each_bytes else "kv_cache_memory"
    instead = ["a GPU with more memory", "more gpus"]
    if kv_bytes > size.weight_bytes // 10:
        instead.append("a smaller max_model_len" if kv_bytes == each_bytes else "a smaller kv_cache_memory")
        instead += ["kv_cache_dtype: fp8"] if serve.kv_cache_dtype != "fp8" else []
    needed = (size.weight_bytes + kv_bytes) / deploy.gpus + _GPU_OVERHEAD_BYTES
    raise ConfigError(
        f"the model does not fit: {gib(size.weight_bytes)} of weights ({size.origin}) and {gib(kv_bytes)} for {what} are more "
        f"than the {gib(max(0, have))} that can be used on {_cards(gpu, deploy)}. Each GPU would need "
        f"{gib(math.ceil(needed / serve.gpu_memory_utilization))}. Choose {' or '.join(instead)}; if the model is smaller than "
        "that, set parameters",
        param="gpu",
    )


def _memory(deploy: DeployConfig, suited: int, least: int, what: str) -> int:
    """Bytes a pod asks for: as set, else `suited`. Raises `ConfigError` if its limit is below `least`."""
    limit = deploy.memory_limit_bytes
    memory = deploy.memory_bytes or min(whole_gib(suited), limit or whole_gib(suited))
    if max(memory, limit or 0) < least:
        name = "memory" if limit is None else "memory_limit"
        raise ConfigError(
            f"{name} is {gib(limit or memory)}, but {what} {gib(least)}; set more, or leave it out", param=name
        )
    return memory


def _cards(gpu: Gpu, deploy: DeployConfig) -> str:
    """One A10G, or 2 × H100."""
    return f"one {gpu.name}" if deploy.gpus == 1 else f"{deploy.gpus} × {gpu.name}"
