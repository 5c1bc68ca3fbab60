"""The families of `checkpoints.py`: for each, a config of its own, small, in which every setting matters.

Settings that multiply or bound something are far from what does nothing: score scales are not head_dim ** -0.5, caps are near
the size of what they cap, windows and rotated parts smaller than texts and heads.
"""

from __future__ import annotations

from typing import Any

import transformers as hf

TURN_START, TURN_END = 1, 2  # token ids
VOCAB_SIZE = 320

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "bos_token_id": TURN_START, "eos_token_id": TURN_END, "pad_token_id": None,
}  # fmt: skip
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5], "long_factor": [1.0, 1.5, 3.0, 6.0, 12.0, 24.0],
}  # fmt: skip
_TWO_ROPES: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 100_000.0, "factor": 8.0},
}
# Of families whose embeddings are scaled: tied ones would only repeat their last token, whatever the layers do.
_UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
_GLM: dict[str, Any] = {
    "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip

# Config class, model class, the config's fields beside `SHAPE`.
TINY: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (hf.LlamaConfig, hf.LlamaForCausalLM, {}),
    "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    # wider heads than hidden_size / heads, as in Qwen3
    "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM, {"head_dim": 32}),
    "mistral": (hf.MistralConfig, hf.MistralForCausalLM, {"sliding_window": 48, "head_dim": 16}),
    "gemma": (hf.GemmaConfig, hf.GemmaForCausalLM, {"head_dim": 16, **_UNTIED}),
    "gemma2": (
        hf.Gemma2Config, hf.Gemma2ForCausalLM,
        {"head_dim": 16, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 8.0,
         "sliding_window": 48, "attn_implementation": "eager", **_UNTIED},  # other ways leave the soft cap out
    ),
    "gemma3": (
        hf.Gemma3TextConfig, hf.Gemma3ForCausalLM,
        {"head_dim": 16, "query_pre_attn_scalar": 6, "rope_parameters": _TWO_ROPES, "sliding_window": 48,
         "sliding_window_pattern": 2, **_UNTIED},
    ),
    "phi3": (
        hf.Phi3Config, hf.Phi3ForCausalLM,
        {"rope_parameters": LONGROPE, "max_position_embeddings": 4096, "original_max_position_embeddings": 1024},
    ),
    "granite": (
        hf.GraniteConfig, hf.GraniteForCausalLM,
        {"embedding_multiplier": 6.0, "attention_multiplier": 0.09375, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "olmo2": (hf.Olmo2Config, hf.Olmo2ForCausalLM, {}),
    "olmo3": (hf.Olmo3Config, hf.Olmo3ForCausalLM, {
        "rope_parameters": _TWO_ROPES, "sliding_window": 48, "layer_types": ["sliding_attention", "full_attention"],
    }),
    "smollm3": (hf.SmolLM3Config, hf.SmolLM3ForCausalLM, {"no_rope_layer_interval": 2, **_UNTIED}),
    "glm": (hf.GlmConfig, hf.GlmForCausalLM, _GLM),
    "glm4": (hf.Glm4Config, hf.Glm4ForCausalLM, _GLM),
}  # fmt: skip
GGUF_NAMES = {"olmo3": "olmo2", "glm": "chatglm"}  # of architectures, where they are not the family's
# What GGUF files of a family do not say, and so must be as in real models.
GGUF_OVERRIDES: dict[str, dict[str, Any]] = {
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "gemma3": {
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 16,
        "num_hidden_layers": 6,
        "sliding_window_pattern": 6,
    },
    "smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 4},
}
GAIN_OFFSETS = {"gemma": 1.0, "gemma2": 1.0, "gemma3": 1.0}  # what a family's norms add to their gains
