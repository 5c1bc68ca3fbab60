"""The dtype of keys and values, as the settings ask for it, where steps do not run on the CUDA kernels.

Does: choose, refuse. Does not: decide what `auto` is in a compiled step for CPUs (`CpuDecoder.cache_dtype`).
"""

from __future__ import annotations

from typing import Protocol

import torch

from tonle.config.engine import EngineConfig
from tonle.errors import ConfigError


class AnyDecoder(Protocol):
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...


def asked_kv_dtype(config: EngineConfig) -> torch.dtype | None:
    """None: what suits the model, or fp8, which no model has without the CUDA kernels."""
    return {"float32": torch.float32, "int8": torch.int8}.get(config.kv_cache_dtype)


def kv_dtype_of(decoder: AnyDecoder, config: EngineConfig) -> torch.dtype:
    """Raises `ConfigError`."""
    asked = asked_kv_dtype(config)
    if config.kv_cache_dtype == "auto":
        chosen: torch.dtype = getattr(decoder, "cache_dtype", decoder.dtype)
        return chosen
    if asked is None:
        instead = "leave it auto" if decoder.device.type == "cuda" else "set int8, or leave it auto"
        raise ConfigError(
            f"kv_cache_dtype fp8 needs the CUDA kernels, which do not run here; {instead}", param="kv_cache_dtype"
        )
    check_computes_in_float32(decoder, config)
    return asked


def check_computes_in_float32(decoder: AnyDecoder, config: EngineConfig) -> None:
    """Where keys and values are asked to be float32 or int8. Raises `ConfigError`."""
    if decoder.dtype != torch.float32:
        raise ConfigError(
            f"kv_cache_dtype {config.kv_cache_dtype} needs a model computed in float32, and this one is computed in "
            f"{str(decoder.dtype).removeprefix('torch.')}; set dtype float32, or leave kv_cache_dtype auto",
            param="kv_cache_dtype",
        )
