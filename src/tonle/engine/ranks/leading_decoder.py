"""`LeadingDecoder`: rank 0's part of a model, and the other ranks with it; for a runner, a model like any other.

Does: refuse what cannot be divided, start the ranks, tell them of each step and adapter before computing its own part. Does
not: load or compute by itself (`models/parallel/`, `Decoder`).
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from tonle.config.engine import EngineConfig
from tonle.engine.device import choose_device
from tonle.engine.ranks.own_part import load_own_part, pool_bytes
from tonle.engine.ranks.rank_messages import AdapterParts, Begin, ComputeStep, ReleaseCache
from tonle.engine.ranks.ranks import STEP_TIMEOUT_S, OnLost, Ranks
from tonle.errors import ConfigError
from tonle.models.adapters.adapter import Adapter
from tonle.models.decoder import Decoder
from tonle.models.inputs import KVCache, StepInputs
from tonle.models.load.other import other_architecture_of
from tonle.models.parallel.group import Group
from tonle.models.parallel.shard import Shard, check_size
from tonle.models.read_spec import read_spec
from tonle.models.source import ModelSource
from tonle.models.spec import ModelSpec

log = logging.getLogger("tonle.engine")


class LeadingDecoder:
    def __init__(self, whole: ModelSpec, own: Decoder, ranks: Ranks, pool_bytes: int, previous_threads: int) -> None:
        self.whole = whole
        self.pool_bytes = pool_bytes  # for keys and values, on each rank
        self._own = own
        self._ranks = ranks
        self._size = 1 + len(ranks.pids)
        self._previous_threads = previous_threads  # of torch, in this process

    @property
    def spec(self) -> ModelSpec:
        """Of rank 0's part: what sizes its cache."""
        return self._own.spec

    @spec.setter
    def spec(self, spec: ModelSpec) -> None:
        self._own.spec = spec

    @property
    def device(self) -> torch.device:
        return self._own.device

    @property
    def dtype(self) -> torch.dtype:
        return self._own.dtype

    @property
    def pids(self) -> list[int]:
        """Of the other ranks' processes."""
        return self._ranks.pids

    def enable_adapters(self, num_slots: int, max_rank: int) -> None:
        self._own.enable_adapters(num_slots, max_rank)

    def begin(self, kv: KVCache, config: EngineConfig, on_lost: OnLost) -> None:
        """All ranks make a cache like this one, and meet. Comes before the first step."""
        slots = config.max_loras if config.uses_adapters else 0
        kv_dtype = str(kv.k.dtype).removeprefix("torch.")
        self._ranks.begin(Begin(kv.num_blocks, kv_dtype, slots, config.max_lora_rank))
        self._own.group = Group.connect(0, self._size, self._ranks.store, self.device, self._ranks.timeout_s)
        self._ranks.watch(on_lost)

    def forward(self, inputs: StepInputs, kv: KVCache) -> torch.Tensor:
        self._ranks.send(ComputeStep.of(inputs))
        return self._own.forward(inputs, kv)

    def forward_hidden(self, inputs: StepInputs, kv: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        self._ranks.send(ComputeStep.of(inputs))
        return self._own.forward_hidden(inputs, kv)

    def set_adapter(self, slot: int, adapter: Adapter | None) -> None:
        for rank in range(1, self._size):
            part = None if adapter is None else Shard(rank, self._size).adapter(self.whole, adapter)
            self._ranks.send_to(rank, AdapterParts.messages(slot, part))
        self._own.set_adapter(slot, None if adapter is None else Shard(0, self._size).adapter(self.whole, adapter))

    def release_memory(self) -> None:
        """That of the other ranks' caches, as `Runner.release_memory` does with the one here."""
        self._ranks.send(ReleaseCache())

    def await_loss(self) -> None:
        """As `Ranks.await_loss`."""
        self._ranks.await_loss()

    def close(self) -> None:
        """End the other ranks."""
        self._ranks.close()
        torch.set_num_threads(self._previous_threads)


def open_parallel(model: ModelSource | Any, config: EngineConfig) -> LeadingDecoder:
    """Load a model on `tensor_parallel_size` ranks. Raises `ConfigError`, `ModelError`."""
    size = config.tensor_parallel_size
    whole = _checked(model, config)
    threads = torch.get_num_threads()
    own_threads = max(1, threads // size) if choose_device(config.device).type == "cpu" else threads
    ranks = Ranks(model, config, own_threads, timeout_s=STEP_TIMEOUT_S)
    try:
        torch.set_num_threads(own_threads)
        own = load_own_part(model, config, 0)
        least = min(ranks.wait_loaded(), pool_bytes(own, config))
    except BaseException:
        torch.set_num_threads(threads)
        ranks.close()
        raise
    if own.device.type == "cuda":
        log.warning("%d GPUs compute this model together, on plain torch operations and NCCL: more than one GPU has not been "
                    "run by the project, and our CUDA kernels are not used, so expect it to be slow", size)  # fmt: skip
    else:
        log.info("%d processes compute this model together, with %d threads each, on torch operations: the compiled step for "
                 "CPUs is for one process", size, own_threads)  # fmt: skip
    return LeadingDecoder(whole, own, ranks, least, threads)


def _checked(model: ModelSource | Any, config: EngineConfig) -> ModelSpec:
    """The spec of the whole model, if it can be divided."""
    size, param = config.tensor_parallel_size, "tensor_parallel_size"
    if not isinstance(model, ModelSource):
        raise ConfigError(
            f"tensor_parallel_size={size} needs a model in files, which every rank reads its part of; give its folder or hub "
            "name instead of a live model", param=param,
        )  # fmt: skip
    if (other := other_architecture_of(model)) is not None:
        raise ConfigError(
            f"{other} runs through transformers, which computes it on one device; leave tensor_parallel_size "
            "(--tensor-parallel-size) out", param=param,
        )  # fmt: skip
    device = choose_device(config.device)
    if device.type == "cuda":
        if device.index is not None:
            raise ConfigError(
                f"device {config.device} names one GPU, but tensor_parallel_size={size} takes {size}; set device to cuda, and "
                "say which GPUs with the environment variable CUDA_VISIBLE_DEVICES", param="device",
            )  # fmt: skip
        if (found := torch.cuda.device_count()) < size:
            raise ConfigError(
                f"tensor_parallel_size={size} takes {size} GPUs, and torch sees {found} here; take fewer, or a machine with "
                "more: ranks on several machines are not supported", param=param,
            )  # fmt: skip
    whole = read_spec(model).for_context(config.max_sequence_length)
    check_size(whole, size)
    return whole
