"""Families: how one architecture differs from the plain decoder, one row each in `FAMILIES`.

Does: name the differences that a checkpoint's config does not say. Does not: read files (`read_hf.py`, `read_gguf.py`) or need
torch. CONTRIBUTING.md shows how a family is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tonle.errors import ModelError
from tonle.models.spec import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsRow:
    """How a family's mixtures of experts differ from one another."""

    size: str = "moe_intermediate_size"  # what its configs call the size of an expert
    normed: bool | None = None  # whether the shares of a token's experts add up to 1; None = `norm_topk_prob` says
    gguf_normed: bool = False  # the same, where a GGUF file does not say
    shared: bool = False  # every token has a shared expert, too, with a gate
    bias: bool = False  # of the router and of the experts
    # Of tensors that hold all experts:
    transposed: bool = False  # their matrices are (in, out)
    by_turns: bool = False  # rows of gate and of up by turns, not those of gate first


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one architecture differs from the plain decoder. `None` = the checkpoint's own config says."""

    gguf: str | None = None  # the architecture's name in GGUF files
    gguf_interleaved: bool = False  # GGUF stores q and k rows with the two halves of each head interleaved
    qkv_bias: bool | None = False
    o_bias: bool | None = False
    mlp_bias: bool | None = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    norms: Literal["before", "after", "both"] = "before"  # where a layer's norms stand around attention and mixer
    gain_offset: float = 0.0
    activation: Activation | None = None  # whatever the config says
    scaled_embedding: bool = False  # by the square root of hidden_size
    sinks: bool = False
    experts: ExpertsRow | None = None
    # Which layers `sliding_window` concerns. listed: those of `layer_types`, if `use_sliding_window`; every: those of
    # `layer_types`, or all but each `sliding_window_pattern`-th
    window: Literal["none", "all", "listed", "every"] = "none"
    # What settings are where the config does not say; where that is what Llama's are, it need not be here. Settings that
    # Llama does not have count only in families that name them here.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # How its checkpoints spell what comes after `model.layers.N.`, where it is not Llama's spelling.
    renamed: Mapping[str, str] = field(default_factory=dict)  # from our name of a module to the checkpoint's
    joined: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # from the checkpoint's to ours side by side in it
    pairs: bool = False  # the rotation turns rows 2 i and 2 i + 1 of a q or k head, not i and i + half


_QKV: dict[str, tuple[str, ...]] = {"self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
_GATE_UP: dict[str, tuple[str, ...]] = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
_GEMMA: dict[str, Any] = {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
_GLM: dict[str, Any] = {
    "head_dim": 128, "partial_rotary_factor": 0.5, "attention_bias": True, "rms_norm_eps": 1.5625e-7,
    "eos_token_id": (151329, 151336, 151338),
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(gguf="llama", gguf_interleaved=True, qkv_bias=None, o_bias=None, mlp_bias=None),
    "MistralForCausalLM": Family(window="all", defaults={"sliding_window": 4096}),
    "Qwen2ForCausalLM": Family(gguf="qwen2", qkv_bias=True, window="listed"),
    "Qwen3ForCausalLM": Family(
        gguf="qwen3", qkv_bias=None, o_bias=None, qk_norm=True, window="listed", defaults={"head_dim": 128}
    ),
    "GemmaForCausalLM": Family(
        gguf="gemma", qkv_bias=None, o_bias=None, gain_offset=1.0, activation="gelu_tanh", scaled_embedding=True,
        defaults=_GEMMA,
    ),
    "Gemma2ForCausalLM": Family(
        gguf="gemma2", qkv_bias=None, o_bias=None, norms="both", gain_offset=1.0, scaled_embedding=True, window="every",
        defaults=_GEMMA | {
            "sliding_window": 4096, "sliding_window_pattern": 2, "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
    ),
    "Gemma3ForCausalLM": Family(
        gguf="gemma3", qkv_bias=None, o_bias=None, qk_norm=True, norms="both", gain_offset=1.0, scaled_embedding=True,
        window="every",
        defaults=_GEMMA | {
            "sliding_window": 4096, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
            "final_logit_softcapping": None, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0,
        },
    ),
    "Phi3ForCausalLM": Family(
        gguf="phi3", window="all", joined=_QKV | _GATE_UP,
        defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0, "original_max_position_embeddings": 4096},
    ),
    "GraniteForCausalLM": Family(
        gguf="granite", gguf_interleaved=True, qkv_bias=None, o_bias=None, mlp_bias=None,
        defaults={"embedding_multiplier": 1.0, "attention_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0},
    ),
    "Olmo2ForCausalLM": Family(
        gguf="olmo2", qkv_bias=None, o_bias=None, qk_norm=True, qk_norm_whole=True, norms="after",
        defaults={"rms_norm_eps": 1e-5},
    ),
    "Olmo3ForCausalLM": Family(
        qkv_bias=None, o_bias=None, qk_norm=True, qk_norm_whole=True, norms="after", window="every",
        defaults={
            "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 500_000.0,
            "rope_local_base_freq": 500_000.0,
        },
    ),
    "SmolLM3ForCausalLM": Family(
        gguf="smollm3", gguf_interleaved=True, qkv_bias=None, o_bias=None, mlp_bias=None, window="listed",
        defaults={
            "no_rope_layers": None, "no_rope_layer_interval": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True,
        },
    ),
    "GlmForCausalLM": Family(
        gguf="chatglm", gguf_interleaved=True, qkv_bias=None, joined=_QKV | _GATE_UP, pairs=True, defaults=_GLM
    ),
    "Glm4ForCausalLM": Family(
        gguf="glm4", gguf_interleaved=True, qkv_bias=None, norms="both", joined=_GATE_UP, pairs=True, defaults=_GLM,
        renamed={
            "post_attention_layernorm": "post_self_attn_layernorm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        },
    ),
    "MixtralForCausalLM": Family(
        gguf="llama", gguf_interleaved=True, window="all", defaults={"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
        experts=ExpertsRow(size="intermediate_size", normed=True),
        renamed={
            "mlp.gate": "block_sparse_moe.gate", "mlp.experts.N.gate_proj": "block_sparse_moe.experts.N.w1",
            "mlp.experts.N.up_proj": "block_sparse_moe.experts.N.w3",
            "mlp.experts.N.down_proj": "block_sparse_moe.experts.N.w2",
        },
    ),
    "Qwen2MoeForCausalLM": Family(
        gguf="qwen2moe", qkv_bias=True, window="every", experts=ExpertsRow(shared=True),
        defaults={"use_sliding_window": False, "sliding_window": 4096, "sliding_window_pattern": 2, "qkv_bias": True},
    ),
    "Qwen3MoeForCausalLM": Family(
        gguf="qwen3moe", qkv_bias=None, o_bias=None, qk_norm=True, window="all", experts=ExpertsRow(gguf_normed=True),
        defaults={"use_sliding_window": False, "sliding_window": 4096},
    ),
    "OlmoeForCausalLM": Family(
        gguf="olmoe", qkv_bias=None, o_bias=None, qk_norm=True, qk_norm_whole=True, defaults={"rms_norm_eps": 1e-5},
        experts=ExpertsRow(size="intermediate_size"),
    ),
    "GptOssForCausalLM": Family(
        gguf="gpt-oss", qkv_bias=None, o_bias=None, sinks=True, activation="swigluoai", window="every",
        experts=ExpertsRow(size="intermediate_size", normed=True, bias=True, transposed=True, by_turns=True),
        defaults={
            "head_dim": 64, "attention_bias": True, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "truncate": False,
            "sliding_window": 128, "sliding_window_pattern": 2, "swiglu_limit": 7.0,
        },
        renamed={"mlp.gate": "mlp.router"},
    ),
}  # fmt: skip


def family(architecture: str) -> Family:
    """The family's row, or `ModelError` naming the architectures there are."""
    if architecture not in FAMILIES:
        raise ModelError(f"architecture {architecture!r} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[architecture]


def gguf_architecture(name: str, *, experts: bool = False) -> str:
    """From GGUF's name of an architecture to ours, or `ModelError` naming those there are. `experts`: whether the file has
    some, which tells Mixtral from Llama."""
    found = {architecture: row for architecture, row in FAMILIES.items() if row.gguf == name}
    for architecture, row in found.items():
        if (row.experts is not None) == experts:
            return architecture
    if found:
        raise ModelError(
            f"models of GGUF architecture {name!r} {'with' if experts else 'without'} experts are not supported"
        )
    supported = ", ".join(dict.fromkeys(row.gguf for row in FAMILIES.values() if row.gguf))
    raise ModelError(f"GGUF architecture {name!r} is not supported; supported: {supported}")
