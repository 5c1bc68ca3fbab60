"""Adapters at the start of an engine: read what the settings name, and size the slots for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tonle.config.engine import MAX_LORA_RANK, EngineConfig
from tonle.engine.adapters.loaded_adapters import LoadedAdapters
from tonle.engine.messages import ToFront
from tonle.errors import ConfigError, ModelError
from tonle.models.adapters.adapter import Adapter, HeldAdapter
from tonle.models.adapters.read_adapter import expand, read_adapter
from tonle.models.spec import ModelSpec

log = logging.getLogger("tonle.engine")


def read_given(config: EngineConfig, spec: ModelSpec) -> tuple[dict[str, Adapter], EngineConfig]:
    """The adapters of `config.lora`, and the settings with whole paths and a rank that holds them all. Raises `ModelError`."""
    given = {}
    paths = {name: str(expand(path).absolute()) for name, path in config.lora.items()}
    for name, path in paths.items():
        try:
            given[name] = read_adapter(Path(path), spec, max_rank=MAX_LORA_RANK)
        except ModelError as error:
            raise ModelError(f"adapter {name} cannot be loaded: {error.message}", param="lora") from error
        log.info("adapter %s: rank %d, %.1f MB, sha256:%s, from %s",
                 name, given[name].rank, given[name].num_bytes / 1e6, given[name].digest[:16], path)  # fmt: skip
    rank = max([config.max_lora_rank, *(adapter.rank for adapter in given.values())])
    return given, replace(config, lora=paths, max_lora_rank=rank)


def open_adapters(
    given: dict[str, Adapter],
    config: EngineConfig,
    spec: ModelSpec,
    prepare: Callable[[Adapter], HeldAdapter],
    publish: Callable[[ToFront], None],
) -> LoadedAdapters:
    """`given` are those of `config.lora`; `prepare` gives them the form that the runner takes."""

    def read(path: str) -> HeldAdapter:
        return prepare(read_adapter(Path(path), spec, max_rank=config.max_lora_rank))

    loaded = LoadedAdapters(read, max_in_memory=max(config.max_cpu_loras, config.max_loras), publish=publish)
    for name, adapter in given.items():
        loaded.add(name, config.lora[name], prepare(adapter))
    return loaded


def check_takes_adapters(decoder: object, config: EngineConfig) -> None:
    """Raises `ConfigError`."""
    if not hasattr(decoder, "enable_adapters"):
        raise ConfigError(
            f"this model runs on {type(decoder).__name__}, which takes no LoRA adapters; leave lora and enable_lora (--lora, "
            "--enable-lora) out, or merge the adapter into the model", param="lora" if config.lora else "enable_lora",
        )  # fmt: skip


def enable_adapters(decoder: Any, config: EngineConfig) -> None:
    """Slots in a decoder that runs on torch operations or on the compiled CPU step. Raises `ConfigError`."""
    check_takes_adapters(decoder, config)
    decoder.enable_adapters(config.max_loras, config.max_lora_rank)
