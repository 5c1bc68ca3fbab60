"""`open_tiers`: from settings to the tiers of one engine."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path
from typing import Any, Protocol

import torch

from tonle.config.engine import EngineConfig
from tonle.engine.kv.block_copies import BlockCopies
from tonle.engine.kv.block_pool import BlockPool
from tonle.engine.kv.tiers.disk import DiskTier
from tonle.engine.kv.tiers.host_memory import HostMemory
from tonle.engine.kv.tiers.namespace import digest_of_model, namespace_of
from tonle.engine.kv.tiers.redis_tier import RedisTier
from tonle.engine.kv.tiers.tiers import KvTiers
from tonle.engine.machine import device_name
from tonle.errors import ConfigError
from tonle.models.inputs import KVCache
from tonle.models.source import ModelSource
from tonle.models.spec import ModelSpec

log = logging.getLogger("tonle.engine")


class AnyDecoder(Protocol):
    @property
    def spec(self) -> ModelSpec: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...


def open_tiers(
    model: ModelSource | Any, decoder: AnyDecoder, kv: KVCache, pool: BlockPool, config: EngineConfig
) -> KvTiers:
    """Raises `ConfigError`."""
    copies = BlockCopies(kv)
    memory, disk, shared = None, None, None
    if config.kv_offload_memory:
        memory = _memory(copies, config.kv_offload_memory)
    if config.kv_offload_dir is not None:
        disk = DiskTier(Path(config.kv_offload_dir).expanduser(), config.kv_offload_disk)
    if config.kv_offload_redis is not None:
        shared = RedisTier(config.kv_offload_redis)
    # What is only in this process needs no name that others would understand.
    name = secrets.token_bytes(16) if disk is None and shared is None else digest_of_model(model)
    facts = (decoder.spec, type(decoder).__name__, decoder.dtype, kv.k.dtype, kv.block_size, device_name(decoder.device),
             config.quantization, config.quantization_group_size, config.activation_bits, config.load_format)  # fmt: skip

    def namespace(kernel_changes: int) -> bytes:
        return namespace_of(name, (*facts, getattr(decoder, "crossover", 0), kernel_changes))

    return KvTiers(pool, copies, namespace, memory, disk, shared, block_size=kv.block_size)


def _memory(copies: BlockCopies, num_bytes: int) -> HostMemory:
    places = num_bytes // copies.block_bytes
    if places == 0:
        raise ConfigError(
            f"kv_offload_memory of {num_bytes} bytes holds no KV block: one takes {copies.block_bytes} bytes",
            param="kv_offload_memory",
        )
    try:
        buffer = copies.host_buffer(places)
    except RuntimeError as error:  # of torch and CUDA
        raise ConfigError(
            f"kv_offload_memory: {num_bytes / 2**30:.1f} GiB cannot be allocated; set it lower",
            param="kv_offload_memory",
        ) from error
    log.info("host memory for %d evicted KV blocks of %.0f KB", places, copies.block_bytes / 1e3)
    return HostMemory(buffer.numpy())
