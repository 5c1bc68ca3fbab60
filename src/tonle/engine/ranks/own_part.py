"""One rank's part of a model, as the settings ask for it: the same on every rank."""

from __future__ import annotations

import torch

from tonle.config.engine import EngineConfig
from tonle.engine.device import DTYPES, choose_device, quantization_of
from tonle.engine.kv_dtype import asked_kv_dtype
from tonle.engine.machine import default_pool_bytes
from tonle.models.decoder import Decoder
from tonle.models.parallel.load_shard import load_shard
from tonle.models.parallel.shard import Shard
from tonle.models.source import ModelSource


def load_own_part(source: ModelSource, config: EngineConfig, rank: int) -> Decoder:
    """On the rank's own device. Raises `ModelError`, `ConfigError`."""
    return load_shard(
        source,
        Shard(rank, config.tensor_parallel_size),
        device=rank_device(config, rank),
        dtype=DTYPES.get(config.dtype),
        context=config.max_sequence_length,
        quantization=quantization_of(config),
        made_up=config.load_format == "random",
    )


def rank_device(config: EngineConfig, rank: int) -> torch.device:
    device = choose_device(config.device)
    return torch.device("cuda", rank) if device.type == "cuda" else device


def pool_bytes(decoder: Decoder, config: EngineConfig) -> int:
    """That this rank can have for keys and values."""
    dtype = asked_kv_dtype(config) or decoder.dtype
    return config.memory_pool_size or default_pool_bytes(decoder.device, config, dtype)
