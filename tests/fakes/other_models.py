"""Small random models of architectures that have no row in `families.py`, and of checkpoints with more parts than text.

Two layers and the vocabulary of `checkpoints.py`. Each architecture is here for something that it does otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.fakes.checkpoints import TURN_END, TURN_START, VOCAB_SIZE, tiny_tokenizer

_IDS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "bos_token_id": TURN_START, "eos_token_id": TURN_END, "pad_token_id": None,
    "tie_word_embeddings": False,  # tied ones make random models repeat their last token, whatever their layers do
}  # fmt: skip
_SHAPE: dict[str, Any] = {
    **_IDS, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 512,
}  # fmt: skip
_GROUPED = {**_SHAPE, "num_key_value_heads": 2}
_OLD = {**_IDS, "n_embd": 64, "n_layer": 2, "n_head": 4}

# By name: the classes' prefix, the config. Of these, attention can be replaced.
FLAT: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {**_OLD, "n_positions": 512}),  # learned positions, its own names
    "gpt_neox": ("GPTNeoX", {**_SHAPE, "use_parallel_residual": True}),  # a part of each head rotated
    "cohere": ("Cohere", {**_GROUPED, "logit_scale": 0.25, "use_qk_norm": True}),
    "cohere2": ("Cohere2", {**_GROUPED, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}),
    "stablelm": ("StableLm", {**_GROUPED, "use_parallel_residual": False}),
    "phi": ("Phi", _SHAPE),
    "opt": ("OPT", {**_IDS, "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                    "word_embed_proj_dim": 32, "max_position_embeddings": 512}),  # hidden states wider than embeddings
    "starcoder2": ("Starcoder2", {**_GROUPED, "sliding_window": 24}),
    "gpt_bigcode": ("GPTBigCode", {**_OLD, "n_positions": 512, "multi_query": True}),
    # Keys of 24 numbers, values of 16.
    "deepseek_v3": ("DeepseekV3", {**_SHAPE, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1,
                                   "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
                                   "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
                                   "v_head_dim": 16, "num_key_value_heads": 4}),
}  # fmt: skip
# These compute attention by themselves.
PADDED: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon": ("Falcon", {**_SHAPE, "multi_query": True, "new_decoder_architecture": False}),
    "falcon_alibi": ("Falcon", {**_SHAPE, "alibi": True, "multi_query": False, "parallel_attn": False}),
    "bloom": ("Bloom", {**_IDS, "hidden_size": 64, "n_layer": 2, "n_head": 4}),  # no positions but in attention
    "gptj": ("GPTJ", {**_OLD, "n_positions": 512, "rotary_dim": 8}),
    "xglm": ("XGLM", {**_IDS, "d_model": 64, "ffn_dim": 128, "num_layers": 2, "attention_heads": 4,
                      "max_position_embeddings": 512}),
    "mpt": ("Mpt", {**_IDS, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512}),
    "gpt_neo": ("GPTNeo", {**_IDS, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 512,
                           "attention_types": [[["global", "local"], 1]], "window_size": 24}),
}  # fmt: skip
OTHERS = {**FLAT, **PADDED}

_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 16,
}  # fmt: skip
_QWEN_VISION: dict[str, Any] = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 14}
_MROPE: dict[str, Any] = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0}
# By name: the classes' prefix, the text part, the other part.
AROUND_TEXT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llava": ("Llava", {"model_type": "llama", **_GROUPED}, {"model_type": "clip_vision_model", **_VISION}),
    "mistral3": ("Mistral3", {"model_type": "mistral", **_GROUPED, "head_dim": 16, "sliding_window": None},
                 {"model_type": "pixtral", **_VISION, "head_dim": 16}),
    "qwen2_vl": ("Qwen2VL", {**_GROUPED, "rope_parameters": _MROPE}, _QWEN_VISION),
    "qwen2_5_vl": ("Qwen2_5_VL", {**_GROUPED, "rope_parameters": _MROPE},
                   {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}),
    "qwen3_vl": ("Qwen3VL", {**_GROUPED, "head_dim": 16, "rope_parameters": _MROPE},
                 {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
                  "deepstack_visual_indexes": [0]}),
    "qwen3_vl_moe": ("Qwen3VLMoe", {**_GROUPED, "head_dim": 16, "rope_parameters": _MROPE, "moe_intermediate_size": 48,
                                    "num_experts": 4, "num_experts_per_tok": 2},
                     {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
                      "deepstack_visual_indexes": [0]}),
    "gemma3": ("Gemma3", {**_GROUPED, "head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16,
                          "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True},
               {"model_type": "siglip_vision_model", **_VISION}),
    "smolvlm": ("SmolVLM", {"model_type": "llama", **_GROUPED}, _VISION),
}  # fmt: skip


def other_model(name: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A live model in float32, ready for inference."""
    prefix, fields = OTHERS[name]
    head = "GPT2LMHeadModel" if name == "gpt2" else f"{prefix}ForCausalLM"
    config = getattr(transformers, f"{prefix}Config")(**{**fields, **overrides})
    return _filled(getattr(transformers, head), config, seed)


def model_around_text(name: str, *, seed: int = 0) -> Any:
    prefix, text, vision = AROUND_TEXT[name]
    config = getattr(transformers, f"{prefix}Config")(text_config=text, vision_config=vision)
    return _filled(getattr(transformers, f"{prefix}ForConditionalGeneration"), config, seed)


def save_other(model: Any, path: Path) -> None:
    """A complete folder."""
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)


def _filled(model_class: Any, config: Any, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _fill(name, parameter)
    model.generation_config.eos_token_id = TURN_END
    return model.requires_grad_(False)


def _fill(name: str, parameter: torch.Tensor) -> None:
    """As in `checkpoints.py`: every part matters to what the model says, and no token only repeats itself."""
    if parameter.dim() == 1:
        if name.endswith("weight"):
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(std=0.1)
    elif "lm_head" in name or "embed_out" in name:
        parameter.normal_(std=4.0 * parameter.shape[-1] ** -0.5)
    elif any(part in name for part in ("embed", "wte", "wpe")):
        parameter.normal_(std=0.8 * parameter.shape[-1] ** -0.5)
    else:
        parameter.normal_(std=1.2 * min(parameter.shape[-2:]) ** -0.5)
