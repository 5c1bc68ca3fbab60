"""Small random mixtures of experts: as live transformers models, folders, GGUF files, and folders with MXFP4 experts.

Does: make complete models with few experts, so that each gets tokens. Does not: know our code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Quant
from safetensors.torch import load_file, save_file
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.fakes.checkpoints import TURN_END, TURN_START, VOCAB_SIZE, _write_tokenizer, tiny_tokenizer

NUM_EXPERTS, PER_TOKEN, SIZE = 6, 2, 32
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "num_experts_per_tok": PER_TOKEN,
    "bos_token_id": TURN_START, "eos_token_id": TURN_END, "pad_token_id": None,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 150.0, "factor": 8.0, "original_max_position_embeddings": 32,
         "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}  # fmt: skip
_FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mixtral": (MixtralConfig, MixtralForCausalLM,
                {"num_local_experts": NUM_EXPERTS, "intermediate_size": SIZE, "sliding_window": 40}),
    "qwen2moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM,  # the second layer has no experts
                 {"num_experts": NUM_EXPERTS, "moe_intermediate_size": SIZE, "shared_expert_intermediate_size": 64,
                  "intermediate_size": 64, "num_hidden_layers": 3, "mlp_only_layers": [1]}),
    "qwen3moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM,
                 {"num_experts": NUM_EXPERTS, "moe_intermediate_size": SIZE, "norm_topk_prob": True, "head_dim": 32,
                  "intermediate_size": 96}),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM, {"num_experts": NUM_EXPERTS, "intermediate_size": SIZE}),
    "gpt-oss": (GptOssConfig, GptOssForCausalLM,
                {"num_local_experts": NUM_EXPERTS, "intermediate_size": SIZE, "head_dim": 16, "sliding_window": 24,
                 "rope_parameters": _YARN, "swiglu_limit": 1.5, "attn_implementation": "eager"}),
}  # fmt: skip
EXPERT_FAMILIES = tuple(_FAMILIES)


def tiny_experts(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A live transformers model in float32, ready for inference. `overrides` are fields of its config."""
    config_class, model_class, own = _FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**{**_SHAPE, **own, **overrides})).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _fill(name, parameter)
    for part in model.modules():
        if hasattr(
            part, "limit"
        ):  # gpt-oss: some versions of transformers have a limit of their own, whatever the config says
            part.limit = model.config.swiglu_limit
    model.generation_config.eos_token_id = TURN_END
    return model.requires_grad_(False)


def _fill(name: str, parameter: torch.Tensor) -> None:
    """Such that attention is sharp, routers are decided, and every part matters to the logits."""
    if name.endswith("norm.weight"):
        gain = 1.5 if "q_norm" in name or "k_norm" in name else 1.0
        parameter.uniform_(0.5 * gain, 1.5 * gain)
    elif parameter.dim() == 1 or name.endswith("bias"):
        parameter.normal_(std=0.5)
    elif "embed" in name:
        parameter.normal_(std=0.8 * parameter.shape[-1] ** -0.5)
    else:
        wide = 64 if "gate_up_proj" in name else SIZE if "experts.down_proj" in name else parameter.shape[-1]
        sharp = 4.0 if "lm_head" in name else 1.5 if "q_proj" in name or "k_proj" in name else 1.0
        parameter.normal_(std=(2.0 if "experts" in name else sharp) * wide**-0.5)


def save_experts(family: str, path: Path, **overrides: Any) -> Any:
    """Write a complete Hugging Face folder; returns the live model it was written from."""
    model = tiny_experts(family, **overrides)
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return model


def split_experts(family: str, model: Any) -> dict[str, torch.Tensor]:
    """The model's tensors, those of all experts as (experts, out, in), gate and up apart; views of the model's."""
    found = {}
    for name, tensor in model.state_dict().items():
        stem, _, last = name.rpartition(".")
        if not stem.endswith("experts"):
            found[name] = tensor
            continue
        own = tensor.transpose(1, 2) if family == "gpt-oss" and tensor.dim() == 3 else tensor
        kind = "bias" if last.endswith("_bias") else "weight"
        if last.startswith("down"):
            found[f"{stem}.down_proj.{kind}"] = own
        elif family == "gpt-oss":
            found |= {f"{stem}.gate_proj.{kind}": own[:, ::2], f"{stem}.up_proj.{kind}": own[:, 1::2]}
        else:
            found |= {f"{stem}.gate_proj.{kind}": own[:, :SIZE], f"{stem}.up_proj.{kind}": own[:, SIZE:]}
    return found


def save_experts_gguf(family: str, path: Path, *, quant: Quant = Quant.F32, **overrides: Any) -> Any:
    """Write a GGUF file with the experts' matrices stored as `quant`; returns a live model with the values as stored."""
    model = tiny_experts(family, **overrides)
    architecture = "llama" if family == "mixtral" else family
    writer = gguf.GGUFWriter(path, architecture)
    _write_shape(writer, model.config)
    _write_tokenizer(writer)
    names = gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == architecture), 8)
    with torch.no_grad():
        for name, tensor in split_experts(family, model).items():
            type_ = quant if ".experts." in name and tensor.dim() == 3 else Quant.F32
            packed = gguf.quants.quantize(np.ascontiguousarray(tensor.numpy()), type_)
            tensor.copy_(torch.from_numpy(gguf.quants.dequantize(packed, type_).reshape(tensor.shape)))
            stored = _as_stored(family, name, tensor, model.config).numpy() if type_ == Quant.F32 else packed
            stem = name if name.endswith("sinks") else name.rpartition(".")[0]
            kind = "weight" if name.endswith("sinks") else name.rpartition(".")[2]
            writer.add_tensor(f"{names.get_name(stem)}.{kind}", np.ascontiguousarray(stored), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _as_stored(family: str, name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """llama-type files hold the rows of each q and k head as pairs of one from each half; gates of one row are vectors."""
    if "shared_expert_gate" in name:
        return tensor[0]
    if family != "mixtral" or not (".q_proj." in name or ".k_proj." in name):
        return tensor
    heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
    return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape).contiguous()


def _write_shape(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_expert_count(NUM_EXPERTS)
    writer.add_expert_used_count(PER_TOKEN)
    if size := getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(size)
    if shared := getattr(config, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(shared)
    if config.model_type == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)


_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def save_mxfp4(path: Path) -> Any:
    """A gpt-oss folder as published: experts in blocks of 32 four-bit numbers with an exponent; returns the live model with the
    values as stored. Packed here from the format's description: number 2 i in the low half of byte i."""
    model = save_experts("gpt-oss", path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                continue
            rows = parameter.transpose(1, 2).contiguous()  # (experts, out, in)
            groups = rows.view(*rows.shape[:2], -1, 32)
            exponent = groups.abs().amax(-1).clamp(min=1e-9).log2().floor() - 2
            scaled = groups / exponent.exp2()[..., None]
            nearest = (scaled.abs()[..., None] - _FP4).abs().argmin(-1)
            parameter.copy_(
                (_FP4[nearest] * scaled.sign() * exponent.exp2()[..., None]).view(rows.shape).transpose(1, 2)
            )
            numbers = (nearest + 8 * (scaled < 0)).to(torch.uint8)
            del tensors[name]
            tensors[f"{name}_blocks"] = (numbers[..., ::2] | numbers[..., 1::2] << 4).contiguous()
            tensors[f"{name}_scales"] = (exponent + 127).to(torch.uint8)
    save_file(tensors, file, metadata={"format": "pt"})
    _add_to_config(path, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]})
    return model


def _add_to_config(path: Path, quantization: dict[str, Any]) -> None:
    import json

    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
