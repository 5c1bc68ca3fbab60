"""Weights and settings to a loop that can run: device, precision, memory, and the parts wired together."""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tonle.config.engine import EngineConfig
from tonle.config.no_effect import explain_once
from tonle.engine.adapters.open_adapters import enable_adapters, open_adapters, read_given
from tonle.engine.defaults import read_defaults, suited_to_cpu
from tonle.engine.grammar.compiler import GrammarCompiler
from tonle.engine.kv.block_pool import BlockPool
from tonle.engine.loop import Loop
from tonle.engine.machine import DEFAULT_POOL_BYTES, Machine, device_name, gpu_uuid, kv_cache
from tonle.engine.mailbox import Mailbox
from tonle.engine.messages import ModelCard
from tonle.engine.run.batch_rows import Rows
from tonle.engine.run.runner import Runner
from tonle.engine.sample.sampler import Sampler
from tonle.engine.schedule import Controller, Scheduler, SchedulerLimits, Targets
from tonle.engine.step_log import LoggedEngine, StepLog
from tonle.engine.text import Text, load_text
from tonle.engine.text.no_text import NoText
from tonle.errors import ConfigError
from tonle.models.cpu.open import open_cpu
from tonle.models.decoder import Decoder
from tonle.models.load import default_dtype, load
from tonle.models.read_spec import read_spec
from tonle.models.source import ModelSource
from tonle.models.spec import ModelSpec

if TYPE_CHECKING:  # brings numba
    from tonle.models.cpu.cpu_decoder import CpuDecoder

log = logging.getLogger("tonle.engine")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build(
    model: ModelSource | Any, config: EngineConfig, mailbox: Mailbox, *, lag: int = 0, text: Text | None = None
) -> tuple[Loop, ModelCard]:
    """Load `model` (a source, or a live transformers model) and wire an engine around it. `text`: its text side, which structured
    output needs; None: read from the source, beside the loop."""
    began = time.monotonic()
    explain_once(log, config.without_effect())
    defaults, stops = read_defaults(model, config)  # before the weights: it is quick to fail
    decoder = _decoder(model, config)
    device = decoder.device
    eos_ids = {*decoder.spec.eos_ids, *(token for token in stops if token < decoder.spec.vocab_size)}
    spec = decoder.spec = replace(decoder.spec, eos_ids=tuple(sorted(eos_ids)))
    if device.type == "cpu":
        defaults = suited_to_cpu(defaults, config)
    given, config = read_given(config, spec)
    machine = _cuda_machine(decoder, config) or _torch_machine(decoder, config, lag)
    kv, context_length, runner = machine.kv, machine.context_length, machine.runner
    max_num_seqs, max_num_batched_tokens = machine.max_num_seqs, machine.max_num_batched_tokens
    runner.profile = {} if config.profile_performance else None
    adapters = None
    if config.uses_adapters:
        adapters = open_adapters(given, config, spec, runner.prepare_adapter, mailbox.publish)
    pool = BlockPool(kv.num_blocks, max_idle=config.kv_cache_max_size, gc_threshold=config.gc_threshold)
    targets = _targets(config)
    limits = _limits(machine, config, targets)
    controller = None if targets is None else Controller(targets, limits)
    scheduler = Scheduler(limits, pool, spec.eos_ids, None if adapters is None else adapters.host)
    if adapters is not None:
        adapters.host.is_used, runner.adapters = scheduler.slots.is_used, adapters.host
    compiler = _grammar_compiler(model, config, text, spec)
    parts = {"controller": controller, "adapters": adapters, "compiler": compiler}
    loop_type: Any = Loop if config.step_log is None else _logged_loop(model, decoder, machine, limits, config)
    loop = loop_type(scheduler, runner, mailbox, fatal=device.type == "cuda", **parts)
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
        stored=spec.dtype if config.load_format == "auto" else "",
        defaults=defaults,
        gpu=gpu_uuid(device),
        max_loras=limits.num_adapter_slots,
        hidden_size=spec.hidden_size,
        engine_id=secrets.randbits(62),
    )
    return loop, card


def _logged_loop(
    model: ModelSource | Any,
    decoder: Decoder | CpuDecoder,
    machine: Machine,
    limits: SchedulerLimits,
    config: EngineConfig,
) -> Any:
    """A loop that writes the step log."""
    from tonle.engine.logged_loop import LoggedLoop

    assert config.step_log is not None
    engine = LoggedEngine(
        model=model.name if isinstance(model, ModelSource) else decoder.spec.architecture,
        device=decoder.device.type,
        device_name=device_name(decoder.device),
        dtype=str(decoder.dtype).removeprefix("torch."),
        block_size=limits.block_size,
        num_blocks=machine.kv.num_blocks,
        context_length=limits.context_length,
        vocab_size=decoder.spec.vocab_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        long_prefill_tokens=limits.long_prefill_tokens,
        lag=machine.runner.lag,
        sizes=machine.runner.sizes,
        settings=config.changed(),
    )
    return partial(LoggedLoop, step_log=StepLog(Path(config.step_log), engine))


def _limits(machine: Machine, config: EngineConfig, targets: Targets | None) -> SchedulerLimits:
    # Of one prompt in a step: where no cap is set, a controller may give it all.
    cap = config.long_prefill_token_threshold or max(1, machine.max_num_batched_tokens // (2 if targets is None else 1))
    return SchedulerLimits(
        max_num_seqs=machine.max_num_seqs,
        max_num_batched_tokens=machine.max_num_batched_tokens,
        context_length=machine.context_length,
        block_size=machine.kv.block_size,
        long_prefill_tokens=cap,
        ageing_s=config.priority_ageing_s,
        prefix_caching=config.reuses_prefixes,
        continuous=config.enable_continuous_batching,
        batch_timeout_s=config.batch_timeout_ms / 1000,
        num_adapter_slots=config.max_loras if config.uses_adapters else 0,
        min_forced=1 + machine.runner.lag,  # a step ahead of the host has drawn the first of them already
    )


def _grammar_compiler(
    model: ModelSource | Any, config: EngineConfig, text: Text | None, spec: ModelSpec
) -> GrammarCompiler | None:
    """None where there is no tokenizer."""
    if isinstance(text, NoText) or (text is None and not isinstance(model, ModelSource)):
        return None

    def read_text() -> Text:
        return load_text(model, special_tokens_in_content=config.special_tokens_in_content) if text is None else text

    return GrammarCompiler(read_text, spec.vocab_size, spec.eos_ids)


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


def _targets(config: EngineConfig) -> Targets | None:
    """What adaptive tuning aims for; None if it is off."""
    if not config.tunes_itself:
        return None
    itl_ms, ttft_ms = config.target_itl_ms, config.target_ttft_ms
    return Targets(None if itl_ms is None else itl_ms / 1e3, None if ttft_ms is None else ttft_ms / 1e3)


def _decoder(model: ModelSource | Any, config: EngineConfig) -> Decoder | CpuDecoder:
    dtype = _DTYPES.get(config.dtype)
    if not isinstance(model, ModelSource):  # a live model stays where it is, unless configured otherwise
        return load(model, device=None if config.device == "auto" else choose_device(config.device), dtype=dtype)
    device = choose_device(config.device)
    if device.type == "cpu" and dtype is None and config.load_format == "auto":
        # A step log is read to learn how long steps take: none of them may be from before the kernels were there.
        waits = config.step_log is not None
        return open_cpu(model, activation_bits=config.activation_bits, wait_for_kernels=waits)
    if config.load_format == "auto":
        return load(model, device=device, dtype=dtype)
    spec = read_spec(model)
    return Decoder.random(spec, device, dtype or default_dtype(spec.dtype, device))


def _cuda_machine(decoder: Decoder | CpuDecoder, config: EngineConfig) -> Machine | None:
    """Our kernels, if this is a CUDA device and they can run the model."""
    if decoder.device.type != "cuda" or not isinstance(decoder, Decoder):
        return None
    try:
        from tonle.engine.build_cuda import cuda_machine
    except ImportError:
        log.warning("triton is not installed: this GPU runs plain torch operations, many times slower")
        return None
    return cuda_machine(decoder, config)


def _torch_machine(decoder: Decoder | CpuDecoder, config: EngineConfig, lag: int) -> Machine:
    spec, device = decoder.spec, decoder.device
    if config.uses_adapters:
        enable_adapters(decoder, config)
    if config.kv_cache_dtype != "auto":
        raise ConfigError(
            f"kv_cache_dtype {config.kv_cache_dtype!r} needs the CUDA kernels, which do not run here; leave it auto",
            param="kv_cache_dtype",
        )
    num_bytes = config.memory_pool_size or DEFAULT_POOL_BYTES
    kv, context_length = kv_cache(decoder, config, num_bytes, decoder.dtype)
    max_num_seqs, max_num_batched_tokens = config.batch_limits(gpu=device.type == "cuda")
    max_num_seqs = min(max_num_seqs, kv.num_blocks)
    sampler = Sampler(max_num_seqs, spec.vocab_size, list(spec.eos_ids), device)
    rows = Rows(max_num_seqs, -(-context_length // kv.block_size) + 1, kv.block_size, device)
    runner = Runner(decoder, kv, sampler, rows, lag=lag)
    return Machine(runner, kv, context_length, max_num_seqs, max_num_batched_tokens)
