"""Small random models that are complete: weights, tokenizer, chat template; as live objects, folders and GGUF files.

Two layers, a vocabulary of 320 (3 special tokens, 256 bytes, 61 merges). Weights are such that forgetting any part of the
model changes its greedy text and its log-probabilities by far more than rounding does (`tests/parity/test_mutants.py`).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Quant
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

END_OF_TEXT, TURN_START, TURN_END = 0, 1, 2  # token ids
VOCAB_SIZE = 320
_SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_CORPUS = [
    "the quick brown fox jumps over the lazy dog and then the other one; what is the capital of that land?",
    "ភាសាខ្មែរ ជាភាសាផ្លូវការរបស់ប្រទេសកម្ពុជា។ សួស្ដី តើអ្នកសុខសប្បាយទេ?",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "bos_token_id": TURN_START, "eos_token_id": TURN_END, "pad_token_id": None,
}  # fmt: skip
_FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),  # wider heads than hidden_size / heads, as in Qwen3
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 48, "head_dim": 16}),
}
FAMILIES = tuple(_FAMILIES)
_SHARPNESS = 1.5  # of queries and of keys: scores spread by its square


def tiny_model(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A live transformers model in float32, ready for inference. `overrides` are fields of its config."""
    config_class, model_class, own = _FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**{**_SHAPE, **own, **overrides})).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _fill(name, parameter, tied=model.config.tie_word_embeddings)
    model.generation_config.eos_token_id = TURN_END
    return model.requires_grad_(False)


def _fill(name: str, parameter: torch.Tensor, *, tied: bool) -> None:
    """Random values for one tensor.

    Embeddings are small beside what the layers add: with larger ones, above all tied ones, a model only repeats its last
    token, whatever its layers do. Queries and keys are large enough that a token attends to a few others and not to the
    average of all: which ones depends on positions, windows, norms and biases.
    """
    sharp = ("q_norm", "k_norm") if "_norm" in name else ("q_proj.weight", "k_proj.weight")
    stretch = _SHARPNESS if any(part in name for part in sharp) else 1.0
    if name.endswith("norm.weight"):
        parameter.uniform_(0.5 * stretch, 1.5 * stretch)
    elif parameter.dim() == 1:
        parameter.normal_(std=0.3)
    elif "embed" in name:
        parameter.normal_(std=0.8 * parameter.shape[-1] ** -0.5)
    elif "lm_head" in name:
        if not tied:
            parameter.normal_(std=4.0 * parameter.shape[-1] ** -0.5)
    else:
        parameter.normal_(std=stretch * parameter.shape[-1] ** -0.5)


@functools.cache
def _byte_level_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=_SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level: encodes any text, and splits Khmer letters as real tokenizers do."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_byte_level_bpe(), bos_token="<|im_start|>", eos_token="<|im_end|>", unk_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_folder(family: str, path: Path, *, max_shard_size: str = "1GB", seed: int = 0, **overrides: Any) -> Any:
    """Write a complete Hugging Face folder; returns the live model it was written from."""
    model = tiny_model(family, seed=seed, **overrides)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    tiny_tokenizer().save_pretrained(path)
    return model


def save_gguf(family: str, path: Path, *, quant: Quant = Quant.F32, seed: int = 0, **overrides: Any) -> Any:
    """Write a GGUF file with its matrices stored as `quant`; returns a live model with the values as stored."""
    model = tiny_model(family, seed=seed, **overrides)
    writer = gguf.GGUFWriter(path, family)
    _write_shape(writer, model.config)
    _write_tokenizer(writer)
    if model.config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(model))
    tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name == "lm_head.weight" and tied:
                continue
            type_ = quant if tensor.dim() == 2 else Quant.F32
            stored = gguf.quants.quantize(_as_stored(family, name, tensor, model.config).numpy(), type_)
            tensor.copy_(torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), type_), type_)))
            writer.add_tensor(gguf_name(name), stored, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def gguf_name(name: str) -> str:
    """By the gguf package's own table, not ours."""
    stem, _, kind = name.rpartition(".")
    return f"{_gguf_names().get_name(stem)}.{kind}"


@functools.cache
def _gguf_names() -> gguf.TensorNameMap:
    return gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 64)  # the widest of the architectures we write


def _as_stored(family: str, name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """llama-type files hold the rows of each q and k head as pairs of one from each half."""
    if family != "llama" or not (".q_proj." in name or ".k_proj." in name):
        return tensor
    heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
    return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape).contiguous()


def _write_shape(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_name("tiny")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)


def _write_tokenizer(writer: gguf.GGUFWriter) -> None:
    import json

    bpe = json.loads(_byte_level_bpe().to_str())["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].__getitem__)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in _SPECIAL_TOKENS else normal for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    writer.add_bos_token_id(TURN_START)
    writer.add_eos_token_id(TURN_END)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _llama3_divisors(model: Any) -> np.ndarray[Any, Any]:
    """What each plain frequency must be divided by to give the model's own."""
    ours = model.model.rotary_emb.inv_freq.double()
    dim = 2 * len(ours)
    plain = model.config.rope_parameters["rope_theta"] ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return (plain / ours).float().numpy()
