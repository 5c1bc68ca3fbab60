"""`from_hf_config`: a `ModelSpec` from a Hugging Face config dictionary, in old and new spellings.

Does: what all families share, with the differences that a family's row names. Does not: read files or need torch. What a
config asks for and we do not do is refused here, by name, before any weight is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tonle.errors import ModelError
from tonle.models.config_values import (
    Config,
    by_layer,
    number,
    number_of_layers,
    optional_number,
    token_ids,
    whole_number,
)
from tonle.models.families import Family, family
from tonle.models.read_mixers import hf_mixers
from tonle.models.read_rope import FULL, SLIDING, hf_rope, stretched
from tonle.models.spec import Activation, AttentionSpec, LayerSpec, MixerSpec, ModelSpec, RopeSpec
from tonle.models.text_part import text_part

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip


def from_hf_config(config: Config, generation: Config | None = None) -> ModelSpec:
    """From `config.json` as a dictionary, and `generation_config.json` if there is one."""
    config = text_part(config)
    architectures = config.get("architectures") or ["(none named)"]
    row = family(architectures[0])
    config = {**row.defaults, **config}
    if config.get("use_bidirectional_attention"):
        raise ModelError("models whose tokens see later ones (use_bidirectional_attention) are not supported")
    if config.get("clip_qkv") is not None:
        raise ModelError("queries, keys and values that are kept within bounds (clip_qkv) are not supported")
    hidden_size = whole_number(config, "hidden_size")
    attention = _attention(config, row, hidden_size)
    types = layer_types(config, row)
    mixers = hf_mixers(config, row, activation_of(config, row), len(types))
    windows = [whole_number(config, "sliding_window") if each == SLIDING else None for each in types]
    ropes = _ropes(config, row, types, attention.head_dim)
    max_positions = whole_number(config, "max_position_embeddings")
    eos = token_ids(generation.get("eos_token_id")) if generation else ()
    return ModelSpec(
        architecture=architectures[0],
        vocab_size=whole_number(config, "vocab_size"),
        hidden_size=hidden_size,
        layers=layers_of(row, attention, mixers, windows, ropes),
        norm_eps=number(config, "rms_norm_eps", row.defaults.get("rms_norm_eps", 1e-6)),
        max_positions=stretched(max_positions, tuple(ropes)),
        long_positions=max_positions if any(rope and rope.long_factors for rope in ropes) else 0,
        gain_offset=row.gain_offset,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        embedding_scale=hidden_size**0.5
        if row.scaled_embedding
        else _own_number(config, row, "embedding_multiplier") or 1.0,
        residual_scale=_own_number(config, row, "residual_multiplier") or 1.0,
        logit_scale=1.0 / (_own_number(config, row, "logits_scaling") or 1.0),
        logit_soft_cap=_own_number(config, row, "final_logit_softcapping"),
        eos_ids=eos or token_ids(config.get("eos_token_id")),
        bos_id=config.get("bos_token_id"),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
    )


def _own(config: Config, row: Family, key: str, default: Any = None) -> Any:
    """A setting that counts only in families whose rows name it."""
    return config[key] if key in row.defaults else default


def _own_number(config: Config, row: Family, key: str) -> float | None:
    """Likewise; None also where the config has null."""
    return optional_number(config, key) if key in row.defaults else None


def activation_of(config: Config, row: Family) -> Activation:
    if row.activation is not None:
        return row.activation
    name = config.get("hidden_activation") or config.get("hidden_act", "silu")
    if name not in _ACTIVATIONS:
        raise ModelError(f"activation {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _attention(config: Config, row: Family, hidden_size: int) -> AttentionSpec:
    """That of every layer, but for windows and positions."""
    num_heads = whole_number(config, "num_attention_heads")
    bias = bool(config.get("attention_bias", False))
    scale = _own_number(config, row, "attention_multiplier")
    if (score_size := _own_number(config, row, "query_pre_attn_scalar")) is not None:
        scale = score_size**-0.5
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=whole_number(config, "num_key_value_heads", num_heads),
        head_dim=whole_number(config, "head_dim", hidden_size // num_heads),
        rope=None,
        scale=scale,
        soft_cap=_own_number(config, row, "attn_logit_softcapping"),
        qk_norm=row.qk_norm,
        qk_norm_whole=row.qk_norm_whole,
        sinks=row.sinks,
        qkv_bias=bool(_own(config, row, "qkv_bias", bias if row.qkv_bias is None else row.qkv_bias)),
        o_bias=bias if row.o_bias is None else row.o_bias,
    )


def layers_of(
    row: Family, attention: AttentionSpec, mixers: Sequence[MixerSpec], windows: Sequence[int | None],
    ropes: Sequence[RopeSpec | None],
) -> tuple[LayerSpec, ...]:  # fmt: skip
    """Layers that differ in their mixers, windows and positions; equal ones are the same object."""
    made: dict[tuple[MixerSpec, int | None, RopeSpec | None], LayerSpec] = {}
    found = list(zip(mixers, windows, ropes, strict=True))
    for kind in dict.fromkeys(found):
        mixer, window, rope = kind
        made[kind] = LayerSpec(
            attention=replace(attention, window=window, rope=rope),
            mixer=mixer,
            norm_before=row.norms != "after",
            norm_after=row.norms != "before",
        )
    return tuple(made[kind] for kind in found)


def layer_types(config: Config, row: Family) -> list[str]:
    """FULL or SLIDING, for each layer."""
    num_layers = number_of_layers(config, "num_hidden_layers")
    used = config.get("use_sliding_window", row.window != "listed")
    if row.window == "none" or not used or config.get("sliding_window") is None:
        return [FULL] * num_layers
    if row.window == "all":
        return [SLIDING] * num_layers
    if kinds := config.get("layer_types"):
        found = by_layer(kinds, num_layers, "layer_types")
        if unknown := sorted(set(map(str, found)) - {FULL, SLIDING}):
            raise ModelError(f"layers of type {unknown[0]!r} are not supported; supported: {FULL}, {SLIDING}")
        return found
    if row.window == "every":
        return every(whole_number(config, "sliding_window_pattern"), num_layers)
    first = whole_number(config, "max_window_layers")  # layers below it see everything
    return [SLIDING if layer >= first else FULL for layer in range(num_layers)]


def every(period: int, num_layers: int) -> list[str]:
    """Each `period`-th layer sees everything; with a period of 0, none does."""
    return [SLIDING if not period or (layer + 1) % period else FULL for layer in range(num_layers)]


def _ropes(config: Config, row: Family, types: Sequence[str], head_dim: int) -> list[RopeSpec | None]:
    """For each layer."""
    by_type = {each: hf_rope(config, row, head_dim, each) for each in dict.fromkeys(types)}
    rotated = [True] * len(types)
    if "no_rope_layers" in row.defaults:  # which, as 0 and 1, names those with
        named = config["no_rope_layers"]
        period = whole_number(config, "no_rope_layer_interval")
        rotated = (
            [(layer + 1) % period != 0 for layer in range(len(types))]
            if named is None
            else [bool(each) for each in by_layer(named, len(types), "no_rope_layers")]
        )
    return [by_type[each] if has else None for each, has in zip(types, rotated, strict=True)]
