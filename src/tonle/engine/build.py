"""Weights and settings to a loop that can run: device, precision, memory, and the parts wired together."""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonle.config.engine import MAX_DRAFT, EngineConfig
from tonle.config.no_effect import explain_once
from tonle.engine.adapters.open_adapters import check_takes_adapters, enable_adapters, open_adapters, read_given
from tonle.engine.defaults import read_defaults, suited_to_cpu
from tonle.engine.device import DTYPES, choose_device, quantization_of
from tonle.engine.grammar.compiler import GrammarCompiler
from tonle.engine.kv.block_pool import BlockPool
from tonle.engine.kv_dtype import asked_kv_dtype, check_computes_in_float32, kv_dtype_of
from tonle.engine.loop import Loop
from tonle.engine.machine import Machine, block_bytes, default_pool_bytes, device_name, gpu_uuid, kv_cache
from tonle.engine.mailbox import Mailbox
from tonle.engine.messages import ModelCard
from tonle.engine.open_draft import OpenDraft, open_draft
from tonle.engine.outside_blocks import open_outside_blocks
from tonle.engine.ranks.leading_decoder import LeadingDecoder, open_parallel
from tonle.engine.ranks.ranks import OnLost
from tonle.engine.request import GenerationDefaults
from tonle.engine.run.batch_rows import Rows
from tonle.engine.run.runner import Runner
from tonle.engine.sample.sampler import Sampler
from tonle.engine.schedule import Controller, Drafts, Scheduler, SchedulerLimits, Targets
from tonle.engine.speculate import AheadSpeculator, Speculator
from tonle.engine.step_log import LoggedEngine, StepLog
from tonle.engine.text import Text, load_text
from tonle.engine.text.no_text import NoText
from tonle.errors import ConfigError
from tonle.models.cpu.open import open_cpu
from tonle.models.decoder import Decoder
from tonle.models.load import default_dtype, load, stored_as
from tonle.models.load.other import open_other
from tonle.models.quantize import assemble_quantized
from tonle.models.read_spec import read_spec
from tonle.models.source import ModelSource
from tonle.models.spec import ModelSpec
from tonle.models.weights import Owned, random_tensors

if TYPE_CHECKING:  # these bring numba and transformers
    from tonle.models.cpu.cpu_decoder import CpuDecoder
    from tonle.models.transformers_decoder import TransformersDecoder

    LoadedDecoder = Decoder | LeadingDecoder | CpuDecoder | TransformersDecoder

log = logging.getLogger("tonle.engine")


def _log_lost(reason: str) -> None:
    log.error("%s; the next step will fail", reason)


def build(
    model: ModelSource | Any,
    config: EngineConfig,
    mailbox: Mailbox,
    *,
    lag: int = 0,
    text: Text | None = None,
    on_rank_lost: OnLost = _log_lost,
) -> tuple[Loop, ModelCard]:
    """Load `model` (a source, or a live transformers model) and wire an engine around it. `text`: its text side, which structured
    output needs; None: read from the source, beside the loop. `on_rank_lost` gets the reason, on another thread, if one of
    several devices that compute the model together is lost: no step will end well after that."""
    began = time.monotonic()
    explain_once(log, config.without_effect())
    defaults, stops = read_defaults(model, config)  # before the weights: it is quick to fail
    decoder = _decoder(model, config)
    eos_ids = {*decoder.spec.eos_ids, *(token for token in stops if token < decoder.spec.vocab_size)}
    decoder.spec = replace(decoder.spec, eos_ids=tuple(sorted(eos_ids)))
    try:
        loop, card = _wire(model, config, mailbox, decoder, defaults, lag=lag, text=text, on_rank_lost=on_rank_lost)
    except BaseException:
        if isinstance(decoder, LeadingDecoder):
            decoder.close()
        raise
    card.load_s = time.monotonic() - began
    return loop, card


def _wire(
    model: ModelSource | Any, config: EngineConfig, mailbox: Mailbox, decoder: LoadedDecoder, defaults: GenerationDefaults,
    *, lag: int, text: Text | None, on_rank_lost: OnLost,
) -> tuple[Loop, ModelCard]:  # fmt: skip
    """An engine around a loaded model."""
    spec, device = decoder.spec, decoder.device
    if device.type == "cpu":
        defaults = suited_to_cpu(defaults, config)
    if config.uses_adapters:
        check_takes_adapters(decoder, config)
    whole = decoder.whole if isinstance(decoder, LeadingDecoder) else spec  # what adapters are made for
    given, config = read_given(config, whole)
    draft = None if config.guesses_by != "draft_model" else open_draft(model, config, decoder, lag, text)
    machine = _cuda_machine(decoder, config) or _torch_machine(decoder, config, lag, draft)
    if isinstance(decoder, LeadingDecoder):
        decoder.begin(machine.kv, config, on_rank_lost)
    kv, context_length, runner = machine.kv, machine.context_length, machine.runner
    max_num_seqs, max_num_batched_tokens = machine.max_num_seqs, machine.max_num_batched_tokens
    runner.profile = {} if config.profile_performance else None
    adapters = None
    if config.uses_adapters:
        adapters = open_adapters(given, config, whole, runner.prepare_adapter, mailbox.publish)
    pool = BlockPool(kv.num_blocks, max_idle=config.kv_cache_max_size, gc_threshold=config.gc_threshold)
    targets = _targets(config)
    limits = _limits(machine, config, targets)
    controller = None if targets is None else Controller(targets, limits)
    scheduler = Scheduler(limits, pool, spec.eos_ids, None if adapters is None else adapters.host)
    if adapters is not None:
        adapters.host.is_used, runner.adapters = scheduler.uses_adapter, adapters.host
    scheduler.drafts = _drafts(config, machine, limits, decoder, draft)
    compiler = _grammar_compiler(model, config, text, spec)
    loop_type: Any = Loop if config.step_log is None else _logged_loop(model, decoder, machine, limits, config)
    outside = open_outside_blocks(model, config, decoder, kv, scheduler, adapters)
    ranks = decoder if isinstance(decoder, LeadingDecoder) else None
    parts = {"controller": controller, "adapters": adapters, "compiler": compiler, "outside": outside, "ranks": ranks}
    is_fatal = device.type == "cuda" or ranks is not None
    loop = loop_type(scheduler, runner, mailbox, fatal=is_fatal, **parts)
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
        load_s=0.0,  # not known yet
        stored=stored_as(model, spec) if config.load_format == "auto" else "",
        quantized_to=config.quantization if config.quantization in ("int8", "int4", "fp8") else "",
        defaults=defaults,
        gpu=gpu_uuid(device),
        max_loras=limits.num_adapter_slots,
        hidden_size=spec.hidden_size,
        engine_id=secrets.randbits(62),
        role=config.role or "",
        kv_dtype=str(kv.k.dtype).removeprefix("torch."),
    )
    return loop, card


def _logged_loop(
    model: ModelSource | Any,
    decoder: LoadedDecoder,
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


def _drafts(
    config: EngineConfig, machine: Machine, limits: SchedulerLimits, decoder: LoadedDecoder, draft: OpenDraft | None
) -> Drafts | None:
    """Guesses for steps to check. None: there are none, as asked for, or as this device has it."""
    runner, length = machine.runner, config.speculation_length or MAX_DRAFT
    if draft is not None:
        return Drafts(draft.drafter(machine, limits, decoder.spec.vocab_size, length), length)
    if config.guesses_by == "draft_model":
        log.warning(
            "a speculation_model is for CPUs: tokens are generated one by one; speculation suffix works here, too"
        )
        return None
    is_measured = decoder.device.type == "cpu" or runner.lag > 0  # not: a GPU without our kernels
    if config.guesses_by == "off" or (config.guesses_by == "auto" and not is_measured):
        return None
    if not runner.lag:
        return Drafts(Speculator(limits.max_num_seqs, limits.max_num_batched_tokens), length)
    ahead = AheadSpeculator(limits.max_num_seqs, limits.max_num_batched_tokens, length)
    return Drafts(ahead, length, ahead=ahead, may_check=runner.checks_drafts, max_entries=runner.max_entries)


def _grammar_compiler(
    model: ModelSource | Any, config: EngineConfig, text: Text | None, spec: ModelSpec
) -> GrammarCompiler | None:
    """None where there is no tokenizer."""
    if isinstance(text, NoText) or (text is None and not isinstance(model, ModelSource)):
        return None

    def read_text() -> Text:
        return load_text(model, special_tokens_in_content=config.special_tokens_in_content) if text is None else text

    return GrammarCompiler(read_text, spec.vocab_size, spec.eos_ids)


def _targets(config: EngineConfig) -> Targets | None:
    """What adaptive tuning aims for; None if it is off."""
    if not config.tunes_itself:
        return None
    itl_ms, ttft_ms = config.target_itl_ms, config.target_ttft_ms
    return Targets(None if itl_ms is None else itl_ms / 1e3, None if ttft_ms is None else ttft_ms / 1e3)


def _decoder(model: ModelSource | Any, config: EngineConfig) -> LoadedDecoder:
    if config.tensor_parallel_size > 1:
        return open_parallel(model, config)
    dtype, context = DTYPES.get(config.dtype), config.max_sequence_length
    quantization = quantization_of(config)
    if not isinstance(model, ModelSource):  # a live model stays where it is, unless configured otherwise
        own_device = None if config.device == "auto" else choose_device(config.device)
        if (other := open_other(model, device=own_device, dtype=dtype, quantization=quantization)) is not None:
            return _as_it_is(other, config)
        return load(model, device=own_device, dtype=dtype, context=context, quantization=quantization)
    device = choose_device(config.device)
    if config.load_format == "auto" and (
        other := open_other(model, device=device, dtype=dtype, quantization=quantization)
    ):
        return _as_it_is(other, config)
    if device.type == "cpu" and dtype is None and config.load_format == "auto":
        # A step log is read to learn how long steps take: none of them may be from before the kernels were there.
        waits = config.step_log is not None
        return open_cpu(
            model,
            activation_bits=config.activation_bits,
            cache_dtype=asked_kv_dtype(config),
            block_size=config.block_size,
            wait_for_kernels=waits,
            context=context,
            quantization=quantization,
        )
    if config.load_format == "auto":
        return load(model, device=device, dtype=dtype, context=context, quantization=quantization)
    spec = read_spec(model).for_context(context)
    dtype = dtype or default_dtype(spec.dtype, device)
    made = random_tensors(spec, device, seed=0)
    return Decoder(spec, assemble_quantized(spec, made, Owned(device, dtype), quantization, device, dtype))


def _as_it_is(decoder: TransformersDecoder, config: EngineConfig) -> TransformersDecoder:
    if config.kv_cache_dtype == "int8":
        raise ConfigError(
            f"{decoder.spec.architecture} runs through transformers, which does not read keys and values in int8; "
            "leave kv_cache_dtype (--kv-cache-dtype) out", param="kv_cache_dtype",
        )  # fmt: skip
    return decoder


def _cuda_machine(decoder: LoadedDecoder, config: EngineConfig) -> Machine | None:
    """Our kernels, if this is a CUDA device and they can run the model."""
    if decoder.device.type != "cuda" or not isinstance(decoder, Decoder):
        return None
    if config.kv_cache_dtype == "int8":
        raise ConfigError("kv_cache_dtype int8 is for CPUs; on a GPU set fp8, or leave it auto", param="kv_cache_dtype")
    if config.kv_cache_dtype == "float32":
        check_computes_in_float32(decoder, config)
    try:
        from tonle.engine.build_cuda import cuda_machine
    except ImportError:
        log.warning("triton is not installed: this GPU runs plain torch operations, many times slower")
        return None
    return cuda_machine(decoder, config)


def _torch_machine(decoder: LoadedDecoder, config: EngineConfig, lag: int, draft: OpenDraft | None = None) -> Machine:
    spec, device = decoder.spec, decoder.device
    if config.uses_adapters:
        enable_adapters(decoder, config)
    dtype = kv_dtype_of(decoder, config)
    num_bytes = config.memory_pool_size or default_pool_bytes(device, config, dtype)
    if isinstance(decoder, LeadingDecoder):
        num_bytes = decoder.pool_bytes
    if draft is not None:  # whose cache has as many blocks, out of the same memory
        num_bytes = draft.share(num_bytes, block_bytes(decoder, config, dtype), config)
    kv, context_length = kv_cache(decoder, config, num_bytes, dtype)
    log.info("KV cache of %.2f GiB in %s: %d tokens", num_bytes / 2**30, str(dtype).removeprefix("torch."),
             kv.num_blocks * kv.block_size)  # fmt: skip
    max_num_seqs, max_num_batched_tokens = config.batch_limits(gpu=device.type == "cuda")
    max_num_seqs = min(max_num_seqs, kv.num_blocks)
    sampler = Sampler(max_num_seqs, spec.vocab_size, list(spec.eos_ids), device)
    rows = Rows(max_num_seqs, -(-context_length // kv.block_size) + 1, kv.block_size, device)
    runner = Runner(decoder, kv, sampler, rows, lag=lag)
    return Machine(runner, kv, context_length, max_num_seqs, max_num_batched_tokens)
