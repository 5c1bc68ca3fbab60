"""The mixer of each layer, from a Hugging Face config or a GGUF file: one perceptron, or experts.

Does: which layers have experts, how many, of which sizes, how they share. Does not: read weights or need torch.
"""

from __future__ import annotations

from tonle.errors import ModelError
from tonle.models.config_values import Config, number, whole_number
from tonle.models.families import ExpertsRow, Family
from tonle.models.gguf_file import GGUFFile
from tonle.models.spec import SWIGLUOAI_ALPHA, Activation, MixerSpec

_SOFTMAX = (0, 1, 3)  # expert_gating_func in GGUF: not named; of all experts; of the chosen ones
_NAMES_OF_COUNT = ("num_experts", "num_local_experts")


def hf_mixers(config: Config, row: Family, activation: Activation, num_layers: int) -> list[MixerSpec]:
    """For each layer."""
    bias = bool(config.get("mlp_bias", False)) if row.mlp_bias is None else row.mlp_bias
    with_experts = [False] * num_layers
    if row.experts is not None and all(config.get(name) is None for name in _NAMES_OF_COUNT):
        raise ModelError(f"the model's config names no number of experts ({' or '.join(_NAMES_OF_COUNT)})")
    if row.experts is not None and any(config.get(name) for name in _NAMES_OF_COUNT):
        period, dense = whole_number(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
        with_experts = [index not in dense and (index + 1) % period == 0 for index in range(num_layers)]
        experts = _hf_experts(config, row.experts, activation)
    if not all(with_experts):
        plain = MixerSpec(size=whole_number(config, "intermediate_size"), activation=activation, bias=bias)
    return [experts if has else plain for has in with_experts]


def _hf_experts(config: Config, row: ExpertsRow, activation: Activation) -> MixerSpec:
    if config.get("swiglu_alpha", SWIGLUOAI_ALPHA) != SWIGLUOAI_ALPHA:
        raise ModelError(f"swiglu_alpha {config['swiglu_alpha']!r} is not supported; supported: {SWIGLUOAI_ALPHA}")
    count = next(name for name in _NAMES_OF_COUNT if config.get(name))
    normed = bool(config.get("norm_topk_prob", False)) if row.normed is None else row.normed
    return MixerSpec(
        kind="experts",
        size=whole_number(config, row.size),
        activation=activation,
        bias=row.bias,
        clamp=number(config, "swiglu_limit") if activation == "swigluoai" else 0.0,
        num_experts=whole_number(config, count),
        experts_per_token=whole_number(config, "num_experts_per_tok"),
        normed_shares=normed,
        router_bias=row.bias,
        shared_size=whole_number(config, "shared_expert_intermediate_size") if row.shared else 0,
        shared_gate=row.shared,
    )


def gguf_mixers(file: GGUFFile, own: Config, row: Family, activation: Activation, num_layers: int) -> list[MixerSpec]:
    """For each layer: the file's tensors say which have experts. `own`: the metadata of the architecture."""
    with_experts = [f"blk.{index}.ffn_gate_inp.weight" in file.tensors for index in range(num_layers)]
    if any(with_experts):
        if row.experts is None or not own.get("expert_count"):
            raise ModelError("the file has experts, which models of its architecture do not have")
        experts = _gguf_experts(file, own, row, activation)
    if not all(with_experts):
        bias = "blk.0.ffn_up.bias" in file.tensors
        plain = MixerSpec(size=whole_number(own, "feed_forward_length"), activation=activation, bias=bias)
    return [experts if has else plain for has in with_experts]


def _gguf_experts(file: GGUFFile, own: Config, row: Family, activation: Activation) -> MixerSpec:
    assert row.experts is not None
    if own.get("expert_gating_func", 0) not in _SOFTMAX or own.get("expert_weights_scale", 1.0) not in (0.0, 1.0):
        raise ModelError("experts whose shares are not a softmax of the router's scores are not supported")
    normed = row.experts.gguf_normed if row.experts.normed is None else row.experts.normed
    size = "expert_feed_forward_length" if own.get("expert_feed_forward_length") else "feed_forward_length"
    return MixerSpec(
        kind="experts",
        size=whole_number(own, size),
        activation=activation,
        bias=row.experts.bias,
        clamp=float(row.defaults["swiglu_limit"]) if activation == "swigluoai" else 0.0,
        num_experts=whole_number(own, "expert_count"),
        experts_per_token=whole_number(own, "expert_used_count"),
        normed_shares=bool(own.get("expert_weights_norm", normed)),
        router_bias=row.experts.bias,
        shared_size=whole_number(own, "expert_shared_feed_forward_length") if row.experts.shared else 0,
        shared_gate=row.experts.shared,
    )
