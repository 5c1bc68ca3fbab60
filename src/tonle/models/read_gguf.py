"""`from_gguf`: a `ModelSpec` from a GGUF file's metadata and the names of its tensors.

Does: the metadata of every family that has a name in GGUF. Does not: read weights or need torch. What a file asks for and we do
not do is refused here, by name, before any weight is read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from tonle.errors import ModelError
from tonle.models.config_values import Config, by_layer, named, number_of_layers, whole_number
from tonle.models.families import Family, family, gguf_architecture
from tonle.models.gguf_file import GGMLType, GGUFFile
from tonle.models.read_hf import activation_of, every, layers_of
from tonle.models.read_mixers import gguf_mixers
from tonle.models.read_rope import FULL, SLIDING, stretched, yarn
from tonle.models.spec import AttentionSpec, ModelSpec, RopeSpec

# GGUF files often name one end-of-sequence token where a chat model has several; these control tokens all end a turn.
_END_TOKENS = frozenset({
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "</s>", "<end_of_turn>",
    "<|observation|>",
})  # fmt: skip
_MISTYPED_END_TOKENS = frozenset({"<end_of_turn>"})  # files exist in which it is no control token
# In gpt-oss's format <|end|> ends a message, after which the same turn may go on.
_HARMONY_END_TOKENS = frozenset({"<|return|>", "<|call|>", "<|endoftext|>"})
_CONTROL_TOKEN = 3  # in tokenizer.ggml.token_type
# Layers of the models whose scores are scaled by hidden_size / num_heads in place of head_dim, which no metadata says.
_WIDE_SCORES = {("gemma2", 46), ("gemma3", 62)}
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


def from_gguf(file: GGUFFile) -> ModelSpec:
    with named(file.path):
        return _from_gguf(file)


def _from_gguf(file: GGUFFile) -> ModelSpec:
    prefix = file.metadata.get("general.architecture")
    if not isinstance(prefix, str):
        raise ModelError("the file does not name its architecture (general.architecture)")
    own = {
        key.removeprefix(f"{prefix}."): value for key, value in file.metadata.items() if key.startswith(f"{prefix}.")
    }
    architecture = gguf_architecture(prefix, experts=bool(own.get("expert_count")))
    row = family(architecture)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError("tensor token_embd.weight is missing")
    hidden_size = whole_number(own, "embedding_length")
    num_layers = number_of_layers(own, "block_count")
    attention = _attention(file, own, row, hidden_size)
    types = _layer_types(own, row, num_layers)
    windows = [whole_number(own, "attention.sliding_window") if each == SLIDING else None for each in types]
    ropes = _ropes(file, own, row, types, attention.head_dim)
    mixers = gguf_mixers(file, own, row, activation_of(row.defaults, row), num_layers)
    context = whole_number(own, "context_length")
    return ModelSpec(
        architecture=architecture,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        layers=layers_of(row, attention, mixers, windows, ropes),
        norm_eps=float(own.get("attention.layer_norm_rms_epsilon", 1e-6)),
        max_positions=stretched(context, tuple(ropes)),
        long_positions=context if any(rope and rope.long_factors for rope in ropes) else 0,
        tie_embeddings="output.weight" not in file.tensors,  # norms have their families' offset in them
        embedding_scale=hidden_size**0.5 if row.scaled_embedding else float(own.get("embedding_scale", 1.0)),
        residual_scale=float(own.get("residual_scale", 1.0)),
        logit_scale=1.0 / float(own.get("logit_scale", 1.0)),
        logit_soft_cap=_positive(own.get("final_logit_softcapping")),
        eos_ids=_eos_ids(file.metadata),
        bos_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        dtype=_commonest_type(file),
    )


def _attention(file: GGUFFile, own: Config, row: Family, hidden_size: int) -> AttentionSpec:
    """That of every layer, but for windows and positions."""
    num_heads = whole_number(own, "attention.head_count")
    scale = _positive(own.get("attention.scale"))
    if (row.gguf, own["block_count"]) in _WIDE_SCORES:
        scale = (hidden_size // num_heads) ** -0.5
    qkv_bias = "blk.0.attn_q.bias" in file.tensors or "blk.0.attn_qkv.bias" in file.tensors
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=whole_number(own, "attention.head_count_kv", num_heads),
        head_dim=whole_number(own, "attention.key_length", hidden_size // num_heads),
        rope=None,
        scale=scale,
        soft_cap=_positive(own.get("attn_logit_softcapping")),
        qk_norm=row.qk_norm,
        qk_norm_whole=row.qk_norm_whole,
        sinks=row.sinks,
        qkv_bias=qkv_bias,
        o_bias="blk.0.attn_output.bias" in file.tensors,
    )


def _positive(value: Any) -> float | None:
    """GGUF writes 0 where there is none."""
    return float(value) if value else None


def _layer_types(own: Config, row: Family, num_layers: int) -> list[str]:
    """FULL or SLIDING, for each layer. llama-type files name windows that Mistral's have and others do not: not heeded."""
    pattern = own.get("attention.sliding_window_pattern")
    if not own.get("attention.sliding_window") or (row.window != "all" and row.window != "every" and pattern is None):
        return [FULL] * num_layers
    if row.window == "all":
        return [SLIDING] * num_layers
    if pattern is not None and not isinstance(pattern, int):
        return [SLIDING if each else FULL for each in by_layer(pattern, num_layers, "sliding_window_pattern")]
    return every(row.defaults["sliding_window_pattern"] if pattern is None else pattern, num_layers)


def _ropes(file: GGUFFile, own: Config, row: Family, types: list[str], head_dim: int) -> list[RopeSpec | None]:
    """For each layer."""
    part = whole_number(own, "rope.dimension_count", head_dim)
    rotated = None if part == head_dim else part
    rope = replace(_rope(file, own, rotated), truncate=row.defaults.get("truncate", True))
    of_type = {FULL: rope, SLIDING: rope}
    if "rope_local_base_freq" in row.defaults or row.window == "none":  # Gemma 3, OLMo 3: scaling concerns the others
        theta = own.get("rope.freq_base_swa", row.defaults.get("rope_local_base_freq", rope.theta))
        of_type[SLIDING] = RopeSpec(theta=float(theta), rotated=rotated)
    period = row.defaults.get("no_rope_layer_interval")
    has = [not period or (layer + 1) % period != 0 for layer in range(len(types))]
    if own.get("rope.scaling.finetuned") is False and "attention_multiplier" in row.defaults:  # Granite's switch
        has = [False] * len(types)
    return [of_type[each] if rotates else None for each, rotates in zip(types, has, strict=True)]


def _rope(file: GGUFFile, own: Config, rotated: int | None) -> RopeSpec:
    theta = float(own.get("rope.freq_base", 10_000.0))
    stretch, short, long = (_factors(file, name) for name in ROPE_TENSORS)
    if stretch is not None:  # llama3 scaling comes as finished divisors
        return RopeSpec(theta=theta, kind="factors", factors=stretch, rotated=rotated)
    if short is not None and long is not None:
        original = whole_number(own, "rope.scaling.original_context_length", whole_number(own, "context_length"))
        return RopeSpec(
            theta=theta, kind="factors", factors=short, long_factors=long, original_max_positions=original,
            attention_factor=float(own.get("rope.scaling.attn_factor", 1.0)), rotated=rotated,
        )  # fmt: skip
    kind = own.get("rope.scaling.type", "linear" if "rope.scale_linear" in own else "none")
    factor = float(own.get("rope.scaling.factor", own.get("rope.scale_linear", 1.0)))
    if kind == "none" or factor == 1.0:
        return RopeSpec(theta=theta, rotated=rotated)
    if kind == "linear":
        return RopeSpec(theta=theta, kind="linear", factor=factor, rotated=rotated)
    if kind == "yarn":
        original = whole_number(own, "rope.scaling.original_context_length", whole_number(own, "context_length"))
        rope = yarn(theta, original, {"factor": factor}, rotated)
        # GGUF's factor comes on top of the one derived from the stretch; the Hugging Face setting replaces it.
        return replace(rope, attention_factor=rope.attention_factor * float(own.get("rope.scaling.attn_factor", 1.0)))
    raise ModelError(f"rope scaling {kind!r} is not supported; supported: none, linear, yarn, longrope")


def _factors(file: GGUFFile, name: str) -> tuple[float, ...] | None:
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    if tensor.type is not GGMLType.F32:
        raise ModelError(f"tensor {name} should be F32, not {tensor.type.name}")
    return tuple(tensor.data.view(np.float32).tolist())


def _eos_ids(metadata: Config) -> tuple[int, ...]:
    identifiers = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = {int(token) for token in identifiers if token is not None}
    types = metadata.get("tokenizer.ggml.token_type")
    if types is not None:
        tokens = metadata.get("tokenizer.ggml.tokens", [])
        found = {tokens[i]: int(i) for i in np.flatnonzero(np.asarray(types) == _CONTROL_TOKEN)}
        ends = _HARMONY_END_TOKENS if found.keys() >= _HARMONY_END_TOKENS else _END_TOKENS
        ids.update(found[token] for token in ends & found.keys())
        ids.update(i for i, token in enumerate(tokens) if token in _MISTYPED_END_TOKENS)
    return tuple(sorted(ids))


def _commonest_type(file: GGUFFile) -> str:
    """The type most of the model's bytes are stored in."""
    num_bytes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        num_bytes[tensor.type.name] += tensor.data.nbytes
    return num_bytes.most_common(1)[0][0]
