"""Workloads and model shapes for one GPU. Weights are random: speed does not depend on their values.

Does: prompts and lengths that depend on a seed only, and the bytes a decode step must read. Does not: run anything.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

Job = tuple[list[int], int]  # prompt, tokens to generate

READ_BYTES_PER_S = 4.43e12  # measured on an H200
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-1.5b": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960,
        "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
        "tie_word_embeddings": True, "rope_theta": 1000000.0, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 151643, "eos_token_id": 151645,
        "use_sliding_window": False,
    },
    "llama-3.2-3b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 128256, "tie_word_embeddings": True, "rope_theta": 500000.0, "max_position_embeddings": 131072,
        "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192},
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 128000,
        "eos_token_id": 128009, "attention_bias": False, "mlp_bias": False,
    },
    "llama-2-7b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
        "tie_word_embeddings": False, "rope_theta": 10000.0, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
        "attention_bias": False, "mlp_bias": False,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "tie_word_embeddings": False, "rope_theta": 500000.0, "max_position_embeddings": 131072,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192},
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 128000,
        "eos_token_id": 128009, "attention_bias": False, "mlp_bias": False,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "tie_word_embeddings": False, "rope_theta": 1000000.0, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 151643, "eos_token_id": 151645,
        "attention_bias": False, "use_sliding_window": False,
    },
    "tiny": {  # to try the benchmark itself, on any machine
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32000,
        "tie_word_embeddings": True, "rope_theta": 10000.0, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 1000, "eos_token_id": 1001,
        "attention_bias": False, "mlp_bias": False,
    },
}  # fmt: skip


def write_config(name: str, root: Path) -> Path:
    """A model folder with nothing but the config: for `load_format="random"`."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    return folder


def experts_read(experts: int, per_token: int, rows: int) -> float:
    """How many experts are chosen by any of so many rows, on average, if each chooses at random."""
    return experts * (1 - (1 - per_token / experts) ** rows)


def weight_bytes(name: str, rows: int = 1) -> int:
    """Bytes of bf16 weights one decode step reads: all but the input embedding, the output matrix once; of experts, those that
    so many rows choose."""
    shape = SHAPES[name]
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    head_dim = shape.get("head_dim", hidden // shape["num_attention_heads"])
    q, kv = shape["num_attention_heads"] * head_dim, shape["num_key_value_heads"] * head_dim
    mixer: float = 3 * hidden * shape["intermediate_size"]
    if experts := shape.get("num_experts"):
        read = experts_read(experts, shape["num_experts_per_tok"], rows)
        mixer = 3 * hidden * shape["moe_intermediate_size"] * read + experts * hidden  # the router
    per_layer = hidden * (q + 2 * kv) + q * hidden + mixer
    return int(2 * (layers * per_layer + hidden * shape["vocab_size"]))


def decode_one(count: int, seed: int = 0) -> list[Job]:
    """One user, a short prompt, a long answer."""
    rng = random.Random(seed)
    return [([rng.randrange(10, 30000) for _ in range(32)], 512) for _ in range(count)]


def serving(count: int, seed: int = 0) -> list[Job]:
    """Chat-like: prompts of 32 to 400 tokens, answers of 128 to 512."""
    rng = random.Random(seed)
    return [
        ([rng.randrange(10, 30000) for _ in range(rng.randint(32, 400))], rng.randint(128, 512)) for _ in range(count)
    ]


def offline(count: int, seed: int = 0) -> list[Job]:
    """A batch job: 100 to 1024 tokens in and out."""
    rng = random.Random(seed)
    return [
        ([rng.randrange(10, 30000) for _ in range(rng.randint(100, 1024))], rng.randint(100, 1024))
        for _ in range(count)
    ]
