"""The CUDA machine: buffers, kernels, a profile run, the KV cache in what memory is left, graphs. In this order.

Imports triton; `build.py` imports this only where there is a CUDA device.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch

from tonle.config.cache_dir import use_triton_dir
from tonle.config.engine import EngineConfig
from tonle.engine.machine import Machine, kv_cache, wanted_context
from tonle.engine.run.cuda import CudaRunner
from tonle.engine.run.graphs import Graphs
from tonle.engine.run.packing import Packer
from tonle.engine.run.settings import RowSampling
from tonle.errors import ConfigError
from tonle.models.cuda.batch import Sizes
from tonle.models.cuda.cuda_layer import support, unsupported
from tonle.models.cuda.decode_tiling import max_items
from tonle.models.cuda.model import CudaModel
from tonle.models.decoder import Decoder
from tonle.models.inputs import KVCache
from tonle.models.layer_order import say_support

log = logging.getLogger("tonle.engine")

_MAX_UPDATES = 1024  # new block table entries that travel with a step; more go by a copy of their own
_LEAST_ROWS = 64  # of a step with guesses, each of which is one, where there are fewer sequences
_RESERVE_BYTES = 512 * 2**20  # for graphs and for what a few rows ask for beyond them


def cuda_machine(
    decoder: Decoder,
    config: EngineConfig,
    *,
    capture: bool = True,
    lag: int = 1,
    adapter_slots: int | None = None,
    max_rank: int | None = None,
) -> Machine | None:
    """None, and a line in the log, if the kernels cannot run this model. Slots and rank: those of the settings, unless given."""
    spec = decoder.spec
    if adapter_slots is None:
        adapter_slots = config.max_loras if config.uses_adapters else 0
    if (why := unsupported(spec)) is not None:
        log.warning("the CUDA kernels cannot run this model (%s); it runs on plain torch operations", why)
        return None
    say_support(spec, support, log)
    kept_in = use_triton_dir()
    began = time.monotonic()
    context = wanted_context(decoder, config)
    table_width = -(-context // config.block_size) + 1
    max_rows, max_tokens = config.batch_limits(gpu=True)
    guess_rows = max(0, min(_LEAST_ROWS, max_tokens) - max_rows) if config.guesses_by in ("auto", "suffix") else 0
    num_items = max_items(max_rows + guess_rows, spec.num_kv_heads)
    sizes = Sizes(max_rows + guess_rows, max_tokens, _MAX_UPDATES, num_items, adapter_slots, guess_rows)
    with torch.inference_mode():
        model = CudaModel(decoder, sizes, table_width, context)
        if adapter_slots:
            model.enable_adapters(adapter_slots, max_rank or config.max_lora_rank)
        dtype = _kv_dtype(decoder, config)
        model.kv = _one_block(model, config, dtype)
        if capture:
            _compile(model, kept_in)
        compiled = time.monotonic()
        num_bytes = config.memory_pool_size or _free_after_profile(model, config)
        kv, context_length = kv_cache(decoder, config, num_bytes, dtype)
        model.kv = kv
        ready = time.monotonic()
        graphs = Graphs(model, capture=capture)
    packer = Packer(sizes, table_width, config.block_size, spec.num_kv_heads, pinned=decoder.device.type == "cuda")
    runner = CudaRunner(model, packer, RowSampling(model, list(spec.eos_ids)), graphs, lag=lag)
    if model.adapters is not None:
        log.info("%d adapters of rank up to %d can be computed together; they take %.2f GiB; "
                 "%d of the graphs are theirs", adapter_slots, model.adapters.rank, model.adapters.num_bytes / 2**30,
                 graphs.num_adapted)  # fmt: skip
    log.info("KV cache of %.1f GiB in %s: %d tokens; kernels %.1f s, profile %.1f s, %d graphs in %.1f s",
             num_bytes / 2**30, str(dtype).removeprefix("torch."), kv.num_blocks * kv.block_size, compiled - began,
             ready - compiled, graphs.num_graphs, graphs.capture_s)  # fmt: skip
    return Machine(runner, kv, context_length, min(max_rows, kv.num_blocks), sizes.max_tokens)


def _compile(model: CudaModel, folder: Path) -> None:
    """Says where compiled kernels are kept, and whether they were there: a first start takes ten seconds longer."""
    before = _num_entries(folder)
    log.info("%s the CUDA kernels %s %s", *(("reusing", "in") if before else ("compiling", "to")), folder)
    model.compile()
    if before and (new := _num_entries(folder) - before):
        log.info("compiled %d CUDA kernels that were not there yet", new)


def _num_entries(folder: Path) -> int:
    """Kernels and launchers that Triton has kept: it makes a folder for each."""
    try:
        return sum(1 for _ in folder.iterdir())
    except OSError:
        return 0


def _kv_dtype(decoder: Decoder, config: EngineConfig) -> torch.dtype:
    return torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else decoder.dtype


def _one_block(model: CudaModel, config: EngineConfig, dtype: torch.dtype) -> KVCache:
    """A cache for steps with nothing in them, before we know how large the real one can be."""
    spec = model.spec
    return KVCache(
        num_layers=spec.num_layers, num_blocks=1, block_size=config.block_size, num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim, dtype=dtype, device=model.logits.device,
    )  # fmt: skip


def _free_after_profile(model: CudaModel, config: EngineConfig) -> int:
    """Run the largest steps once, with nothing in them to write, and see what memory is left."""
    device = model.logits.device
    for adapted in (False,) if model.adapters is None else (False, True):
        model.body(model.sizes.max_tokens, tiles=1, adapted=adapted)
        model.head(model.sizes.max_rows, adapted=adapted)
        model.decode(model.sizes.max_sequences, adapted=adapted)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    left = int(free - (1 - config.gpu_memory_utilization) * total) - _RESERVE_BYTES
    if left <= 0:
        raise ConfigError(
            f"no memory is left for the KV cache: {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free after the "
            f"weights; raise gpu_memory_utilization ({config.gpu_memory_utilization}) or lower max_num_batched_tokens",
            param="gpu_memory_utilization",
        )
    return left
