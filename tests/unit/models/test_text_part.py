"""Text parts: their configs and names, whatever the age of a checkpoint."""

from __future__ import annotations

import pytest

from tonle.errors import ModelError
from tonle.models.read_spec import from_hf_config
from tonle.models.text_part import is_around_text, text_name, text_part


@pytest.mark.parametrize(("stored", "name"), [
    ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),  # Llava, Gemma 3, Mistral 3
    ("language_model.lm_head.weight", "lm_head.weight"),
    ("model.language_model.embed_tokens.weight", "model.embed_tokens.weight"),  # Qwen3-VL, and saved by transformers 5
    ("model.text_model.norm.weight", "model.norm.weight"),  # Idefics 3, SmolVLM
    ("model.layers.1.self_attn.q_proj.bias", "model.layers.1.self_attn.q_proj.bias"),  # Qwen2-VL
    ("lm_head.weight", "lm_head.weight"),
    ("visual.blocks.0.attn.qkv.weight", None),
    ("model.visual.merger.mlp.0.weight", None),
    ("model.vision_tower.layers.0.mlp.fc1.weight", None),
    ("vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight", None),
    ("multi_modal_projector.linear_1.weight", None),
    ("model.connector.modality_projection.proj.weight", None),
    ("image_newline", None),
])  # fmt: skip
def test_names(stored: str, name: str | None) -> None:
    assert text_name(stored) == name


def test_a_plain_config_is_its_own_text_part() -> None:
    config = {"architectures": ["LlamaForCausalLM"], "text_config": {"hidden_size": 1}}
    assert text_part(config) is config and not is_around_text(config)


def test_the_first_llava_leaves_out_what_llama_has_by_default() -> None:
    spec = from_hf_config({
        "architectures": ["LlavaForConditionalGeneration"], "tie_word_embeddings": False, "torch_dtype": "float16",
        "text_config": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096,
                        "rms_norm_eps": 1e-5, "vocab_size": 32_064},
    })  # fmt: skip
    assert (spec.architecture, spec.hidden_size, spec.num_layers, spec.num_kv_heads) == (
        "LlamaForCausalLM",
        4096,
        32,
        32,
    )
    assert (spec.vocab_size, spec.max_positions, spec.norm_eps, spec.dtype) == (32_064, 4096, 1e-5, "float16")


def test_qwen2_vl_without_a_config_inside() -> None:
    spec = from_hf_config({
        "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "vocab_size": 151_936,
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 2, "num_attention_heads": 12,
        "num_key_value_heads": 2, "max_position_embeddings": 32_768, "rope_theta": 1e6, "tie_word_embeddings": True,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "eos_token_id": 151_645,
        "use_sliding_window": False, "sliding_window": 32_768, "max_window_layers": 28, "vision_config": {"depth": 32},
    })  # fmt: skip
    assert (spec.architecture, spec.tie_embeddings, spec.eos_ids) == ("Qwen2ForCausalLM", True, (151_645,))
    (rope,) = spec.ropes
    assert rope is not None and (rope.theta, rope.kind) == (1e6, "default")
    assert spec.layers[0].attention.qkv_bias and spec.sliding_window is None


def test_gemma_3_names_only_what_differs() -> None:
    """As of the checkpoint with 4 billion weights."""
    spec = from_hf_config({
        "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "torch_dtype": "bfloat16",
        "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10_240,
                        "num_hidden_layers": 34, "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    })  # fmt: skip
    assert (spec.architecture, spec.vocab_size, spec.num_heads, spec.num_kv_heads) == (
        "Gemma3ForCausalLM",
        262_208,
        8,
        4,
    )
    assert (spec.head_dim, spec.tie_embeddings, spec.eos_ids, spec.max_positions) == (256, True, (1, 106), 131_072)
    assert spec.windows[:7] == (1024,) * 5 + (None, 1024)
    local, whole = spec.layers[0].attention.rope, spec.layers[5].attention.rope
    assert local is not None and (local.theta, local.kind) == (10_000.0, "default")
    assert whole is not None and (whole.theta, whole.kind, whole.factor) == (1e6, "linear", 8.0)


def test_text_parts_that_are_refused() -> None:
    outside = {"architectures": ["LlavaForConditionalGeneration"]}
    with pytest.raises(
        ModelError, match="text part of LlavaForConditionalGeneration, of kind 'novel', is not supported"
    ):
        text_part({**outside, "text_config": {"model_type": "novel"}})
    with pytest.raises(ModelError, match="text_config should be an object, not 5"):
        text_part({**outside, "text_config": 5})
