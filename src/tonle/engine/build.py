"""Weights and settings to a loop that can run: device, precision, memory, and the parts wired together."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from tonle.config.engine import EngineConfig
from tonle.engine.kv.pool import BlockPool
from tonle.engine.loop import Loop
from tonle.engine.mailbox import Mailbox
from tonle.engine.messages import ModelCard
from tonle.engine.run.rows import Rows
from tonle.engine.run.runner import Runner
from tonle.engine.sample.sampler import Sampler
from tonle.engine.schedule import Limits, Scheduler
from tonle.errors import ConfigError
from tonle.models.decoder import Decoder
from tonle.models.inputs import KVCache
from tonle.models.load import load
from tonle.models.source import ModelSource

log = logging.getLogger("tonle.engine")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build(model: ModelSource | Any, config: EngineConfig, mailbox: Mailbox, *, lag: int = 0) -> tuple[Loop, ModelCard]:
    """Load `model` (a source, or a live transformers model) and wire an engine around it."""
    began = time.monotonic()
    device = choose_device(config.device)
    decoder = load(model, device=device, dtype=_DTYPES.get(config.dtype))
    spec, device = decoder.spec, decoder.device
    kv, context_length = _kv_cache(decoder, config)
    max_num_seqs = min(config.max_num_seqs, kv.num_blocks)
    # Every running row must be able to advance by one token in each step.
    max_num_batched_tokens = max(config.max_num_batched_tokens, max_num_seqs)
    sampler = Sampler(max_num_seqs, spec.vocab_size, list(spec.eos_ids), device)
    rows = Rows(max_num_seqs, -(-context_length // kv.block_size) + 1, kv.block_size, device)
    runner = Runner(decoder, kv, sampler, rows, lag=lag)
    runner.profile = {} if config.profile_performance else None
    pool = BlockPool(kv.num_blocks, max_idle=config.kv_cache_max_size, gc_threshold=config.gc_threshold)
    limits = Limits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        context_length=context_length,
        block_size=kv.block_size,
        long_prefill_tokens=config.long_prefill_token_threshold or max(1, max_num_batched_tokens // 2),
        ageing_s=config.priority_ageing_s,
        prefix_caching=config.enable_prefix_caching,
        continuous=config.enable_continuous_batching,
        batch_timeout_s=config.batch_timeout_ms / 1000,
    )
    loop = Loop(Scheduler(limits, pool, spec.eos_ids), runner, mailbox, fatal=device.type == "cuda")
    card = ModelCard(
        architecture=spec.architecture,
        context_length=context_length,
        vocab_size=spec.vocab_size,
        eos_ids=list(spec.eos_ids),
        device=str(device),
        dtype=str(decoder.dtype).removeprefix("torch."),
        block_size=kv.block_size,
        num_blocks=kv.num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        load_s=time.monotonic() - began,
    )
    return loop, card


def choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is none of auto, cpu, cuda, cuda:N", param="device") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but torch sees no CUDA device here", param="device")
    return device


def _kv_cache(decoder: Decoder, config: EngineConfig) -> tuple[KVCache, int]:
    """The cache, and the longest request it and the model allow."""
    spec = decoder.spec
    itemsize = decoder.dtype.itemsize
    block_bytes = 2 * spec.num_layers * config.block_size * spec.num_kv_heads * spec.head_dim * itemsize
    wanted = min(config.max_sequence_length or spec.max_positions, spec.max_positions)
    num_blocks = config.memory_pool_size // block_bytes
    context_length = min(wanted, num_blocks * config.block_size)
    if context_length < 2:
        raise ConfigError(
            f"memory_pool_size of {config.memory_pool_size} bytes holds no KV block: one takes {block_bytes} bytes",
            param="memory_pool_size",
        )
    if context_length < wanted:
        log.warning("the KV cache of %.2f GiB holds %d tokens: requests are limited to that, not %d",
                    config.memory_pool_size / 2**30, context_length, wanted)  # fmt: skip
    kv = KVCache(
        num_layers=spec.num_layers,
        num_blocks=num_blocks,
        block_size=config.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=decoder.dtype,
        device=decoder.device,
    )
    return kv, context_length
