"""Small random models that are complete: weights, tokenizer, chat template; as live objects, folders and GGUF files.

Two layers, a vocabulary of 320 (3 special tokens, 256 bytes, 61 merges). Weights are such that forgetting any part of the
model changes its greedy text and its log-probabilities by far more than rounding does (`tests/parity/test_mutants.py`).
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Quant
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.fakes.gguf_metadata import as_stored, rope_tensors, write_longrope, write_shape
from tests.fakes.tiny_families import (
    GAIN_OFFSETS,
    GGUF_NAMES,
    GGUF_OVERRIDES,
    SHAPE,
    TINY,
    TURN_END,
    TURN_START,
    VOCAB_SIZE,
)

END_OF_TEXT = 0  # token id
_SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_CORPUS = [
    "the quick brown fox jumps over the lazy dog and then the other one; what is the capital of that land?",
    "ភាសាខ្មែរ ជាភាសាផ្លូវការរបស់ប្រទេសកម្ពុជា។ សួស្ដី តើអ្នកសុខសប្បាយទេ?",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

FAMILIES = tuple(TINY)
FIRST_FAMILIES = ("llama", "qwen2", "qwen3", "mistral")  # those with more tests of their own than `test_families.py`
_SHARPNESS = 1.5  # of queries and of keys: scores spread by its square


def tiny_model(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A live transformers model in float32, ready for inference. `overrides` are fields of its config."""
    config_class, model_class, own = TINY[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**copy.deepcopy({**SHAPE, **own, **overrides}))).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _fill(name, parameter, model.config, GAIN_OFFSETS.get(family, 0.0))
    model.generation_config.eos_token_id = TURN_END
    return model.requires_grad_(False)


def _fill(name: str, parameter: torch.Tensor, config: Any, gain_offset: float) -> None:
    """Random values for one tensor.

    Embeddings are small beside what the layers add: with larger ones, above all tied ones, a model only repeats its last
    token, whatever its layers do. Queries and keys are large enough that a token attends to a few others and not to the
    average of all: which ones depends on positions, windows, norms and biases.
    """
    sharp = ("q_norm", "k_norm") if "_norm" in name else ("q_proj.weight", "k_proj.weight")
    stretch = _SHARPNESS if any(part in name for part in sharp) else 1.0
    if name.endswith("norm.weight"):
        parameter.uniform_(0.5 * stretch, 1.5 * stretch).sub_(gain_offset)
    elif parameter.dim() == 1:
        parameter.normal_(std=0.3)
    elif "embed" in name:
        parameter.normal_(std=0.8 * parameter.shape[-1] ** -0.5)
    elif "lm_head" in name:
        if not config.tie_word_embeddings:
            parameter.normal_(std=4.0 * parameter.shape[-1] ** -0.5)
    else:
        parameter.normal_(std=stretch * parameter.shape[-1] ** -0.5)
        if "qkv_proj" in name:
            parameter[: -parameter.shape[0] * config.num_key_value_heads // _num_heads(config)] *= _SHARPNESS


def _num_heads(config: Any) -> int:
    """Of queries, keys and values."""
    return config.num_attention_heads + 2 * config.num_key_value_heads


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
    model = tiny_model(family, seed=seed, **{**GGUF_OVERRIDES.get(family, {}), **overrides})
    writer = gguf.GGUFWriter(path, GGUF_NAMES.get(family, family))
    write_shape(writer, family, model.config)
    _write_tokenizer(writer)
    if model.config.rope_parameters.get("rope_type") == "longrope":
        write_longrope(writer, model)
    for name, values in rope_tensors(model).items():
        writer.add_tensor(name, values)
    tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name == "lm_head.weight" and tied:
                continue
            type_ = quant if tensor.dim() == 2 else Quant.F32
            stored = gguf.quants.quantize(as_stored(family, name, tensor, model.config).numpy(), type_)
            tensor.copy_(torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), type_), type_)))
            writer.add_tensor(gguf_name(name, writer.arch), stored, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def gguf_name(name: str, architecture: str) -> str:
    """By the gguf package's own table, not ours."""
    stem, _, kind = name.rpartition(".")
    return f"{_gguf_names(architecture).get_name(stem)}.{kind}"


@functools.cache
def _gguf_names(architecture: str) -> gguf.TensorNameMap:
    # qwen3: the widest of the older architectures, whose models of tests may have what their files do not
    named = "QWEN3" if architecture in ("llama", "qwen2") else architecture.upper()
    return gguf.get_tensor_name_map(gguf.MODEL_ARCH[named], 64)


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
