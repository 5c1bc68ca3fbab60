"""The metadata of GGUF files, as their converter writes it for each family (`checkpoints.save_gguf`)."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import torch

# Files of these families hold the rows of each q and k head as pairs of one from each half.
PAIRED = ("llama", "granite", "smollm3")


def write_shape(writer: gguf.GGUFWriter, family: str, config: Any) -> None:
    writer.add_name("tiny")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if family != "phi3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if family != "gemma2":
        writer.add_rope_freq_base(rope["rope_theta"])
    if not family.startswith("gemma"):
        writer.add_rope_dimension_count(int(head_dim * (rope.get("partial_rotary_factor") or 1.0)))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    _write_windows(writer, family, config)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if family == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def _write_windows(writer: gguf.GGUFWriter, family: str, config: Any) -> None:
    if family == "phi3":
        writer.add_sliding_window(config.sliding_window or 0)
    elif family in ("gemma2", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
    elif family == "olmo3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])


def rope_tensors(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Scaling of the rope that files hold as tensors."""
    rope = model.config.rope_parameters
    if rope.get("rope_type") == "llama3":
        return {"rope_freqs.weight": _llama3_divisors(model)}
    if rope.get("rope_type") == "longrope":
        return {
            "rope_factors_long.weight": np.array(rope["long_factor"], np.float32),
            "rope_factors_short.weight": np.array(rope["short_factor"], np.float32),
        }
    return {}


def write_longrope(writer: gguf.GGUFWriter, model: Any) -> None:
    writer.add_rope_scaling_orig_ctx_len(model.config.original_max_position_embeddings)
    writer.add_rope_scaling_attn_factors(model.model.rotary_emb.attention_scaling)


def as_stored(family: str, name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """What the file holds of a tensor of the Hugging Face checkpoint."""
    if family.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    if family not in PAIRED or not (".q_proj." in name or ".k_proj." in name):
        return tensor
    heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
    return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape).contiguous()


def _llama3_divisors(model: Any) -> np.ndarray[Any, Any]:
    """What each plain frequency must be divided by to give the model's own."""
    ours = model.model.rotary_emb.inv_freq.double()
    dim = 2 * len(ours)
    plain = model.config.rope_parameters["rope_theta"] ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return (plain / ours).float().numpy()
