"""`Machine`: what a device offers an engine: a runner, its cache, and how much it can do at a time."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from tonle.config.engine import EngineConfig
from tonle.engine.run.runner import Runner
from tonle.errors import ConfigError
from tonle.models.inputs import SCALED, KVCache
from tonle.models.spec import ModelSpec

log = logging.getLogger("tonle.engine")

DEFAULT_POOL_BYTES = 640 * 2**20  # of KV cache on a CPU, unless configured
_INT8_POOL_BYTES = 320 * 2**20  # in int8: nearly twice the tokens of those 640 MiB in float32


def default_pool_bytes(device: torch.device, config: EngineConfig, dtype: torch.dtype) -> int:
    """Of KV cache in `dtype` where steps run on torch operations or a CPU. On a GPU half of what may be used: steps need the
    other half at times."""
    if device.type != "cuda":
        return _INT8_POOL_BYTES if dtype == torch.int8 else DEFAULT_POOL_BYTES
    free, total = torch.cuda.mem_get_info(device)
    return max(DEFAULT_POOL_BYTES, int(free - (1 - config.gpu_memory_utilization) * total) // 2)


class AnyDecoder(Protocol):
    """What sizes a cache: any of the decoders."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def device(self) -> torch.device: ...


@dataclass(slots=True)
class Machine:
    runner: Runner
    kv: KVCache
    context_length: int  # longest request, tokens
    max_num_seqs: int
    max_num_batched_tokens: int  # at least max_num_seqs: every running row must be able to advance in each step


def gpu_uuid(device: torch.device) -> str:
    """Of an NVIDIA GPU, as its driver knows it: what CUDA counts as device 0 may be another one there. Else empty."""
    if device.type != "cuda" or torch.version.hip is not None:
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def device_name(device: torch.device) -> str:
    """As its maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.machine()
    with contextlib.suppress(OSError):  # Linux has it
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        name = found[1] if found else name
    return f"{name}, {os.cpu_count()} cores"


def give_back() -> None:
    """Free unused memory: on a GPU to the driver, so that the next engine, of any process, finds it free."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def block_bytes(decoder: AnyDecoder, config: EngineConfig, dtype: torch.dtype) -> int:
    spec = decoder.spec
    per_head = spec.head_dim * dtype.itemsize + (4 if dtype in SCALED else 0)  # and its scale, float32
    return 2 * spec.num_layers * config.block_size * spec.num_kv_heads * per_head


def wanted_context(decoder: AnyDecoder, config: EngineConfig) -> int:
    """The longest request the settings and the model allow, tokens."""
    return min(config.max_sequence_length or decoder.spec.max_positions, decoder.spec.max_positions)


def kv_cache(decoder: AnyDecoder, config: EngineConfig, num_bytes: int, dtype: torch.dtype) -> tuple[KVCache, int]:
    """A cache of `num_bytes`, and the longest request it and the model allow."""
    spec = decoder.spec
    per_block = block_bytes(decoder, config, dtype)
    wanted = wanted_context(decoder, config)
    num_blocks = num_bytes // per_block
    context_length = min(wanted, num_blocks * config.block_size)
    if context_length < 2:
        raise ConfigError(
            f"memory_pool_size (--kv-cache-memory) of {num_bytes} bytes holds no KV block: one takes {per_block} bytes",
            param="memory_pool_size",
        )
    asked = config.max_sequence_length
    if asked is not None and asked > spec.max_positions and asked != EngineConfig().max_sequence_length:
        log.warning("max_sequence_length (--max-model-len) is %d, but the model was made for %d tokens: that is the limit",
                    asked, spec.max_positions)  # fmt: skip
    if spec.long_positions:
        log.info("requests may have %d tokens, the model's original context; with a larger max_sequence_length "
                 "(--max-model-len), up to %d, every request is computed with the factors for long contexts",
                 spec.max_positions, spec.long_positions)  # fmt: skip
    if context_length < wanted:
        log.warning("the KV cache of %.2f GiB holds %d tokens: requests are limited to that, not %d",
                    num_bytes / 2**30, context_length, wanted)  # fmt: skip
    try:
        kv = KVCache(
            num_layers=spec.num_layers,
            num_blocks=num_blocks,
            block_size=config.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=dtype,
            device=decoder.device,
        )
    except (MemoryError, RuntimeError, ValueError) as error:  # of numpy, torch and CUDA
        raise ConfigError(
            f"a KV cache of {num_bytes / 2**30:.1f} GiB cannot be allocated: {_free_memory(decoder.device)}. "
            "Set memory_pool_size (--kv-cache-memory) lower, or to None for what suits the device",
            param="memory_pool_size",
        ) from error
    return kv, context_length


def _free_memory(device: torch.device) -> str:
    """What is left for the cache, in words."""
    if device.type == "cuda":
        return f"{torch.cuda.mem_get_info(device)[0] / 2**30:.1f} GiB are free on {device}"
    with contextlib.suppress(OSError, StopIteration):  # not on Linux
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        return f"{kib / 2**20:.1f} GiB are free on this machine"
    return "this machine has less free memory"
