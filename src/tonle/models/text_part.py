"""The text part of checkpoints that also see or hear: its config, and the names of its tensors.

Does: find the decoder inside a multimodal checkpoint and describe it as a checkpoint of its own family. Does not: run the other
parts (the API refuses images by name), read files, or need torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tonle.errors import ModelError
from tonle.models.config_values import Config

# Architectures whose text, where there is no image beside it, is computed as by a plain decoder.
_AROUND_TEXT = frozenset({
    "AyaVisionForConditionalGeneration", "Gemma3ForConditionalGeneration", "Idefics3ForConditionalGeneration",
    "InternVLForConditionalGeneration", "LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration", "Mistral3ForConditionalGeneration", "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration",
    "SmolVLMForConditionalGeneration", "VipLlavaForConditionalGeneration",
})  # fmt: skip
# From the `model_type` of a text part to the architecture of a plain decoder that computes the same. Positions of Qwen's have
# three parts (time, height, width), which are equal in text.
_PLAIN = {
    "cohere2": "Cohere2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
}
# What text parts leave out where it is as here: configs inside of others name only what differs.
_LEFT_OUT: dict[str, Config] = {
    "llama": {"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
              "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "bos_token_id": 1,
              "eos_token_id": 2},
    "mistral": {"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6,
                "bos_token_id": 1, "eos_token_id": 2},
    "qwen2": {"vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32,
              "num_attention_heads": 32, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6},
    "gemma3_text": {"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
                    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
                    "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
                    "sliding_window": 4096, "sliding_window_pattern": 6, "rope_theta": 1_000_000.0,
                    "rope_local_base_freq": 10_000.0, "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1},
    "qwen2_vl_text": {"rope_theta": 1_000_000.0},
    "qwen2_5_vl_text": {"rope_theta": 1_000_000.0},
    "qwen3_vl_text": {"rope_theta": 500_000.0},
    "qwen3_vl_moe_text": {"rope_theta": 500_000.0},
}  # fmt: skip
# What text parts have whatever their configs say.
_ALWAYS: dict[str, Config] = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
# Of the whole checkpoint, where it says so.
_SHARED = ("eos_token_id", "bos_token_id", "tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
# Where text stands beside other parts, by the checkpoint's age. First match wins.
_PREFIXES = (
    (re.compile(r"^(?:model\.)?language_model\.lm_head\."), "lm_head."),
    (re.compile(r"^(?:model\.)?language_model\.(?:model\.)?"), "model."),
    (re.compile(r"^model\.text_model\."), "model."),
    (re.compile(r"^(?=lm_head\.|model\.(?:layers|embed_tokens|norm)\.)"), ""),
)


def is_around_text(config: Config) -> bool:
    """It has other parts beside a decoder that we can run alone."""
    return _architecture(config) in _AROUND_TEXT


def text_part(config: Config) -> Config:
    """The config of the decoder, as if it were a checkpoint of its own; `config` itself where it is one. Raises `ModelError`."""
    if not is_around_text(config):
        return config
    own = config.get("text_config") or config  # the first Qwen2-VL checkpoints have no config inside
    if not isinstance(own, Mapping):
        raise ModelError(f"the model's text_config should be an object, not {own!r}")
    kind = own.get("model_type")
    architecture = _PLAIN.get(kind or "") or _architecture(own)
    if architecture is None or architecture in _AROUND_TEXT:
        raise ModelError(f"the text part of {_architecture(config)}, of kind {kind!r}, is not supported")
    shared = {name: config[name] for name in _SHARED if config.get(name) is not None}
    always = {**_ALWAYS.get(kind or "", {}), "architectures": [architecture]}
    return {**_LEFT_OUT.get(kind or "", {}), **own, **_plain_rope(own), **shared, **always}


def _architecture(config: Config) -> str | None:
    named = config.get("architectures")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else None


def _plain_rope(own: Config) -> dict[str, Any]:
    """Of positions with three equal parts: the kind that it is without them."""
    changed = {}
    for name in ("rope_scaling", "rope_parameters"):
        rope = own.get(name)
        if isinstance(rope, Mapping) and "mrope" in (rope.get("type"), rope.get("rope_type")):
            changed[name] = {**rope, "type": "default", "rope_type": "default"}
    return changed


def text_name(stored: str) -> str | None:
    """From the name of a tensor in a multimodal checkpoint to its name in a plain one; None: it belongs to another part."""
    for prefix, plain in _PREFIXES:
        if prefix.match(stored):
            return prefix.sub(plain, stored, count=1)
    return None
