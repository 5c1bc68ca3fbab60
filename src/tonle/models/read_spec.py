"""`read_spec`: a `ModelSpec` from a model's files.

Does: Hugging Face config dictionaries (old and new spellings) and GGUF metadata. Does not: read weights or need torch.
What a config asks for and we do not do is refused here, by name, before any weight is read.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tonle.config.model_json import read_json
from tonle.errors import ModelError
from tonle.models.gguf_file import GGMLType, GGUFFile
from tonle.models.source import ModelSource
from tonle.models.spec import (
    AttentionSpec,
    Family,
    LayerSpec,
    MixerSpec,
    ModelSpec,
    RopeSpec,
    family,
    gguf_architecture,
)

Config = Mapping[str, Any]

# GGUF files often name one end-of-sequence token where a chat model has several; these control tokens all end a turn.
_END_TOKENS = frozenset(
    {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "</s>"}
)
_MAX_SIZE = 2**31 - 1  # of any size a config names
_MAX_LAYERS = 10_000
_CONTROL_TOKEN = 3  # in tokenizer.ggml.token_type


def read_spec(source: ModelSource) -> ModelSpec:
    """The spec of the model at `source`. Raises `ModelError` naming the file."""
    if source.kind == "gguf":
        return from_gguf(GGUFFile(source.path))
    config = read_json(source.path / "config.json")
    with _named(source.path):
        return from_hf_config(config, _read_generation_config(source.path))


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors get the path. The files are someone else's: a value of any type may stand anywhere in them."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{path}: {error.message}") from None
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise ModelError(f"{path}: a setting of the model makes no sense: {error}") from error


def _read_generation_config(folder: Path) -> Config | None:
    """None if there is none, or one that cannot be read: the engine warns of that when it reads the rest of it."""
    try:
        return read_json(folder / "generation_config.json")
    except ModelError:
        return None


def from_hf_config(config: Config, generation: Config | None = None) -> ModelSpec:
    """From `config.json` as a dictionary, and `generation_config.json` if there is one."""
    architectures = config.get("architectures") or ["(none named)"]
    row = family(architectures[0])
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"activation {config['hidden_act']!r} is not supported; supported: silu")
    attention_bias = bool(config.get("attention_bias", False))
    mlp_bias = bool(config.get("mlp_bias", False))
    hidden_size, num_heads = _int(config, "hidden_size"), _int(config, "num_attention_heads")
    max_positions = _int(config, "max_position_embeddings")
    rope = _hf_rope(config, max_positions)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=_int(config, "num_key_value_heads", num_heads),
        head_dim=_int(config, "head_dim", row.head_dim or hidden_size // num_heads),
        rope=rope,
        qk_norm=row.qk_norm,
        qkv_bias=attention_bias if row.qkv_bias is None else row.qkv_bias,
        o_bias=attention_bias if row.o_bias is None else row.o_bias,
    )
    mixer = MixerSpec(size=_int(config, "intermediate_size"), bias=mlp_bias if row.mlp_bias is None else row.mlp_bias)
    eos = _token_ids(generation.get("eos_token_id")) if generation else ()
    return ModelSpec(
        architecture=architectures[0],
        vocab_size=_int(config, "vocab_size"),
        hidden_size=hidden_size,
        layers=_layers(attention, mixer, _hf_windows(config, row)),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_positions=_stretched(max_positions, rope),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_ids=eos or _token_ids(config.get("eos_token_id")),
        bos_id=config.get("bos_token_id"),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
    )


def _layers(attention: AttentionSpec, mixer: MixerSpec, windows: Sequence[int | None]) -> tuple[LayerSpec, ...]:
    """Layers that differ in their windows alone."""
    kinds = {window: LayerSpec(attention=replace(attention, window=window), mixer=mixer) for window in set(windows)}
    return tuple(kinds[window] for window in windows)


def _int(config: Config, key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"the model's config should name a whole number as {key}, not {value!r}")
    if abs(value) > _MAX_SIZE:
        raise ModelError(f"the model's {key} is beyond any real model's")
    return value


def _num_layers(config: Config, key: str) -> int:
    number = _int(config, key)
    if number > _MAX_LAYERS:
        raise ModelError(f"the model's {key} may be at most {_MAX_LAYERS}, not {number}")
    return number


def _stretched(max_positions: int, rope: RopeSpec) -> int:
    """With yarn, the config may still name the context from before it was stretched."""
    return max(max_positions, int(rope.original_max_positions * rope.factor)) if rope.kind == "yarn" else max_positions


def _token_ids(value: Any) -> tuple[int, ...]:
    """One, several or none; what is neither counts as none."""
    tokens = value if isinstance(value, list | tuple) else [value]
    return tuple(tokens) if all(isinstance(token, int) for token in tokens) else ()


def _hf_windows(config: Config, row: Family) -> tuple[int | None, ...]:
    num_layers = _num_layers(config, "num_hidden_layers")
    window: int | None = config.get("sliding_window", row.default_window)
    if row.window == "none" or window is None:
        return (None,) * num_layers
    if row.window == "all":
        return (window,) * num_layers
    if not config.get("use_sliding_window", False):
        return (None,) * num_layers
    if kinds := config.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = _int(config, "max_window_layers")  # layers below it see everything
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _hf_rope(config: Config, max_positions: int) -> RopeSpec:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    options: Config = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = options.get("rope_type") or options.get("type") or "default"
    theta = float(options.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    if options.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError("rotary positions on a part of each head (partial_rotary_factor) are not supported")
    original = options.get("original_max_position_embeddings") or max_positions
    try:
        if kind == "default":
            return RopeSpec(theta=theta)
        if kind == "linear":
            return RopeSpec(theta=theta, kind="linear", factor=float(options["factor"]))
        if kind == "llama3":
            return RopeSpec(
                theta=theta, kind="llama3", factor=float(options["factor"]), original_max_positions=original,
                low_freq_factor=float(options["low_freq_factor"]), high_freq_factor=float(options["high_freq_factor"]),
            )  # fmt: skip
        if kind == "yarn":
            return _yarn(theta, original, {**options, "factor": options.get("factor") or max_positions / original})
    except KeyError as error:
        raise ModelError(f"rope scaling {kind!r} lacks the setting {error}") from None
    raise ModelError(f"rope scaling {kind!r} is not supported; supported: default, linear, llama3, yarn")


def _yarn(theta: float, original: int, options: Config) -> RopeSpec:
    factor = float(options["factor"])

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = options.get("attention_factor")
    if attention_factor is None:
        top, bottom = options.get("mscale"), options.get("mscale_all_dim")
        attention_factor = magnitude(top) / magnitude(bottom) if top and bottom else magnitude(1.0)
    return RopeSpec(
        theta=theta, kind="yarn", factor=factor, original_max_positions=original,
        beta_fast=float(options.get("beta_fast") or 32.0), beta_slow=float(options.get("beta_slow") or 1.0),
        truncate=bool(options.get("truncate", True)), attention_factor=float(attention_factor),
    )  # fmt: skip


def from_gguf(file: GGUFFile) -> ModelSpec:
    """From a GGUF file's metadata and the names of its tensors."""
    with _named(file.path):
        return _from_gguf(file)


def _from_gguf(file: GGUFFile) -> ModelSpec:
    prefix = file.metadata.get("general.architecture")
    if not isinstance(prefix, str):
        raise ModelError("the file does not name its architecture (general.architecture)")
    architecture = gguf_architecture(prefix)
    own = {
        key.removeprefix(f"{prefix}."): value for key, value in file.metadata.items() if key.startswith(f"{prefix}.")
    }
    if own.get("expert_count"):
        raise ModelError("mixture-of-experts models are not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError("tensor token_embd.weight is missing")
    hidden_size, num_heads = _int(own, "embedding_length"), _int(own, "attention.head_count")
    head_dim = _int(own, "attention.key_length", hidden_size // num_heads)
    if _int(own, "rope.dimension_count", head_dim) != head_dim:
        raise ModelError("rotary positions on a part of each head (rope.dimension_count) are not supported")
    num_layers = _num_layers(own, "block_count")
    rope = _gguf_rope(file, own)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=_int(own, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rope=rope,
        qk_norm=family(architecture).qk_norm,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
    )
    mixer = MixerSpec(size=_int(own, "feed_forward_length"), bias="blk.0.ffn_up.bias" in file.tensors)
    return ModelSpec(
        architecture=architecture,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        layers=_layers(attention, mixer, (None,) * num_layers),
        norm_eps=float(own.get("attention.layer_norm_rms_epsilon", 1e-6)),
        max_positions=_stretched(_int(own, "context_length"), rope),
        tie_embeddings="output.weight" not in file.tensors,
        eos_ids=_gguf_eos_ids(file.metadata),
        bos_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        dtype=_commonest_type(file),
    )


def _gguf_rope(file: GGUFFile, own: Config) -> RopeSpec:
    theta = float(own.get("rope.freq_base", 10_000.0))
    if stretch := file.tensors.get("rope_freqs.weight"):  # llama3 scaling comes as finished divisors
        if stretch.type is not GGMLType.F32:
            raise ModelError(f"tensor rope_freqs.weight should be F32, not {stretch.type.name}")
        return RopeSpec(theta=theta, kind="factors", factors=tuple(stretch.data.view(np.float32).tolist()))
    kind = own.get("rope.scaling.type", "linear" if "rope.scale_linear" in own else "none")
    factor = float(own.get("rope.scaling.factor", own.get("rope.scale_linear", 1.0)))
    if kind == "none" or factor == 1.0:
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec(theta=theta, kind="linear", factor=factor)
    if kind == "yarn":
        original = _int(own, "rope.scaling.original_context_length", _int(own, "context_length"))
        rope = _yarn(theta, original, {"factor": factor})
        # GGUF's factor comes on top of the one derived from the stretch; the Hugging Face setting replaces it.
        return replace(rope, attention_factor=rope.attention_factor * float(own.get("rope.scaling.attn_factor", 1.0)))
    raise ModelError(f"rope scaling {kind!r} is not supported; supported: none, linear, yarn")


def _gguf_eos_ids(metadata: Config) -> tuple[int, ...]:
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = {int(token) for token in named if token is not None}
    types = metadata.get("tokenizer.ggml.token_type")
    if types is not None:
        tokens = metadata.get("tokenizer.ggml.tokens", [])
        ids.update(int(i) for i in np.flatnonzero(np.asarray(types) == _CONTROL_TOKEN) if tokens[i] in _END_TOKENS)
    return tuple(sorted(ids))


def _commonest_type(file: GGUFFile) -> str:
    """The type most of the model's bytes are stored in."""
    num_bytes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        num_bytes[tensor.type.name] += tensor.data.nbytes
    return num_bytes.most_common(1)[0][0]
