"""`outline`: the sizes of a model whose architecture has no row in `families.py`, from its config alone.

Does: tell such models by their config; read the names that configs of other architectures use for the same sizes. Does not: say
what the model computes, which takes `transformers` (`transformers_decoder.py`), or need torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from tonle.config.model_json import read_json
from tonle.errors import ModelError
from tonle.models.config_values import Config, token_ids, whole_number
from tonle.models.families import FAMILIES
from tonle.models.read_spec import read_spec
from tonle.models.source import ModelSource
from tonle.models.spec import AttentionSpec, LayerSpec, MixerSpec, ModelSpec
from tonle.models.text_part import text_part

_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_MIXER = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length")
_DEFAULT_POSITIONS = 2048  # of models whose config names none, such as Bloom
# Beyond the context they were made for these change how they rotate every token, of all requests in a step.
_SWITCHING_ROPES = ("dynamic", "longrope", "su")


def other_architecture(config: Config) -> str | None:
    """The architecture of a model, or of its text part, if that is none of ours."""
    with contextlib.suppress(ModelError):  # of a text part that is none of ours
        config = text_part(config)
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    return first if isinstance(first, str) and first not in FAMILIES else None


def read_sizes(source: ModelSource) -> ModelSpec:
    """The spec of the model at `source`; of one that has no row in `families.py`, its sizes. Raises `ModelError`."""
    if source.kind == "folder":
        config = read_json(source.path / "config.json")
        if other_architecture(config) is not None:
            own = config.get("text_config")
            return outline({**config, **own} if isinstance(own, Mapping) else config)
    return read_spec(source)


def outline(config: Config, generation: Config | None = None) -> ModelSpec:
    """Sizes of layers, heads and context. Raises `ModelError` where the config does not name one."""
    architecture = (config.get("architectures") or ["(none named)"])[0]
    hidden, heads = _size(config, _HIDDEN), _size(config, _HEADS)
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=1 if config.get("multi_query") is True else _size(config, _KV_HEADS, heads),
        head_dim=_size(config, ("head_dim",), max(1, hidden // heads)),
        rope=None,
    )
    layer = LayerSpec(attention=attention, mixer=MixerSpec(size=_size(config, _MIXER, 4 * hidden)))
    return ModelSpec(
        architecture=str(architecture),
        vocab_size=_size(config, ("vocab_size",)),
        hidden_size=hidden,
        layers=(layer,) * _size(config, _LAYERS),
        norm_eps=0.0,
        max_positions=_max_positions(config),
        eos_ids=token_ids((generation or {}).get("eos_token_id")) or token_ids(config.get("eos_token_id")),
        bos_id=config.get("bos_token_id"),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
    )


def _max_positions(config: Config) -> int:
    whole = _size(config, _POSITIONS, _DEFAULT_POSITIONS)
    rope: Any = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if (rope.get("rope_type") or rope.get("type")) not in _SWITCHING_ROPES:
        return whole
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if original is None:  # dynamic: the context is named as it was before
        return whole
    return min(whole, int(original))


def _size(config: Config, names: tuple[str, ...], default: int | None = None) -> int:
    for name in names:
        if config.get(name) is not None:
            return whole_number(config, name)
    if default is None:
        raise ModelError(f"the model's config names no {names[0]}")
    return default
