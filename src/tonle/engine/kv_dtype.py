"""The dtype of keys and values, as the settings ask for it, where steps do not run on the CUDA kernels.

Does: choose, refuse. Does not: decide what `auto` is in a compiled step for CPUs (`CpuDecoder.cache_dtype`).
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from tonle.config.engine import EngineConfig
from tonle.errors import ConfigError


class ComputingDecoder(Protocol):
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...


@runtime_checkable
class ChoosesCacheDtype(Protocol):
    """A decoder whose `auto` is not always the dtype it computes in: `CpuDecoder`, the import of which brings numba."""

    cache_dtype: torch.dtype


def asked_kv_dtype(config: EngineConfig) -> torch.dtype | None:
    """None: what suits the model, or fp8, which no model has without the CUDA kernels."""
    return {"float32": torch.float32, "int8": torch.int8}.get(config.kv_cache_dtype)


def kv_dtype_of(decoder: ComputingDecoder, config: EngineConfig) -> torch.dtype:
    """Of keys and values of this decoder; raises `ConfigError`."""
    asked = asked_kv_dtype(config)
    if config.kv_cache_dtype == "auto":
        return decoder.cache_dtype if isinstance(decoder, ChoosesCacheDtype) else decoder.dtype
    if asked is None:
        instead = "leave it auto" if decoder.device.type == "cuda" else "set int8, or leave it auto"
        raise ConfigError(
            f"kv_cache_dtype fp8 needs the CUDA kernels, which do not run here; {instead}", param="kv_cache_dtype"
        )
    check_computes_in_float32(decoder, config)
    return asked


def check_computes_in_float32(decoder: ComputingDecoder, config: EngineConfig) -> None:
    """Refuse float32 or int8 keys and values for a decoder that computes in another dtype. Raises `ConfigError`."""
    if decoder.dtype != torch.float32:
        raise ConfigError(
            f"kv_cache_dtype {config.kv_cache_dtype} needs a model computed in float32, and this one is computed in "
            f"{str(decoder.dtype).removeprefix('torch.')}; set dtype float32, or leave kv_cache_dtype auto",
            param="kv_cache_dtype",
        )
