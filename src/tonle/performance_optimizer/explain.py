"""The text of `OptimizationConfig.explain()`: every setting, its value, where the value comes from, what it does."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from tonle.config import no_effect
from tonle.performance_optimizer.levels import PRESETS

if TYPE_CHECKING:
    from tonle.performance_optimizer.optimization_config import OptimizationConfig

_TEXT_AT, _TEXT_WIDTH = 43, 77  # column and width of what a setting does
_NO_EFFECT = ("enable_memory_pooling", "compile_model", "enable_gradient_checkpointing", "memory_efficient_attention")

_NOTHING = {
    "enable_gradient_checkpointing": "no gradients are computed",
}  # where that module has no words


def _meanings(config: OptimizationConfig, *, gpu: bool) -> dict[str, str]:
    """What each setting does, with the values it has."""
    several = config.enable_parallel_sampling
    return {
        "max_batch_size": "sequences computed together, each candidate being one",
        "max_num_batched_tokens": "tokens computed in one step, of prompts and continuations together",
        "memory_pool_size": "the KV cache, allocated once when the engine starts",
        "kv_cache_dtype": _keys_and_values(config, gpu=gpu),
        "activation_bits": _activations(config.value("activation_bits", gpu=gpu), gpu=gpu),
        "enable_speculative_decoding": _speculation(config.value("enable_speculative_decoding", gpu=gpu)),
        "speculation_length": "most guesses for one sequence in a step; fewer where fewer pay",
        "enable_parallel_sampling": "the best of several sampled candidates"
        if several
        else "one continuation per prompt",
        "num_parallel_samples": "candidates per prompt; they share its KV blocks" if several else "not used",
    }


def _keys_and_values(config: OptimizationConfig, *, gpu: bool) -> str:
    dtype = config.value("kv_cache_dtype", gpu=gpu)
    if dtype == "fp8":
        return "twice the tokens in the same memory; some tokens change"
    if dtype == "int8":
        return "nearly four times the tokens in the same memory; some tokens change"
    if dtype == "float32" or (not gpu and config.value("activation_bits", gpu=gpu) == 16):
        return "float32: exact"
    if not gpu:
        return (
            "int8 with 4- and 8-bit model files where the processor has dot products of bytes, some tokens change; "
            "else float32, exact"
        )
    return "as the model computes: exact"


def _activations(bits: int, *, gpu: bool) -> str:
    if gpu:
        return "not used: of a CPU"
    if bits == 16:
        return "exact to 1e-4 of float32"
    return "4- and 8-bit model files compute faster; about 1 token in 80 changes"


def _speculation(enabled: bool) -> str:
    if not enabled:
        return "tokens are generated one by one"
    return "steps check guesses from text seen before; answers stay the same"


def explain(config: OptimizationConfig, *, gpu: bool) -> str:
    """`gpu`: for a model that runs on one."""
    lines = [f"level {config.level.name} on a {'GPU' if gpu else 'CPU'}", f"  {PRESETS[config.level].purpose}", ""]
    lines += [_line(config, name, config.value(name, gpu=gpu), text)
              for name, text in _meanings(config, gpu=gpu).items()]  # fmt: skip
    lines += ["", "  Accepted, but not a choice here:"]
    for name in _NO_EFFECT:
        value = config.value(name, gpu=gpu)
        lines.append(_line(config, name, value, no_effect.explain(name, value) or _NOTHING[name]))
    lines += [
        "",
        "  * given; the rest comes from the level. Sequences may be as long as the model and the KV cache allow.",
    ]
    return "\n".join(lines)


def _line(config: OptimizationConfig, name: str, value: Any, text: str) -> str:
    mark = "*" if config.is_set(name) else " "
    first, *more = textwrap.wrap(text, _TEXT_WIDTH)
    return "\n".join(
        [f"  {name:<29}{_shown(name, value):>9}{mark}  {first}", *(" " * _TEXT_AT + line for line in more)]
    )


def _shown(name: str, value: Any) -> str:
    if name != "memory_pool_size":
        return str(value)
    if value is None:
        return "all free"
    return f"{value / 2**30:g} GiB" if value >= 2**30 else f"{value / 2**20:g} MiB"
