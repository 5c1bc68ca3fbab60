"""`EncoderSpec`: a config.json of an encoder as numbers, and `FAMILIES`: what differs between architectures.

Does: name sizes, tensors and the order of a layer. Does not: read weights or need torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tonle.errors import ModelError
from tonle.models.config_values import number_of_layers, whole_number


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Of tensors, without the prefix that a checkpoint with a head has (`bert.`), `.weight` and `.bias`."""

    words: str
    positions: str | None  # None: rotary
    types: str | None
    norm: str
    layer: str  # {} is its number; the others stand behind it
    qkv: tuple[str, ...]  # one matrix, or three that are made one
    out: str
    attention_norm: str
    up: str
    down: str
    mlp_norm: str
    final_norm: str | None


_BERT_NAMES = Names(
    words="embeddings.word_embeddings", positions="embeddings.position_embeddings",
    types="embeddings.token_type_embeddings", norm="embeddings.LayerNorm", layer="encoder.layer.{}.",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"), out="attention.output.dense",
    attention_norm="attention.output.LayerNorm", up="intermediate.dense", down="output.dense",
    mlp_norm="output.LayerNorm", final_norm=None,
)  # fmt: skip
_MODERNBERT_NAMES = Names(
    words="embeddings.tok_embeddings", positions=None, types=None, norm="embeddings.norm", layer="layers.{}.",
    qkv=("attn.Wqkv",), out="attn.Wo", attention_norm="attn_norm", up="mlp.Wi", down="mlp.Wo", mlp_norm="mlp_norm",
    final_norm="final_norm",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What an architecture does its own way."""

    names: Names
    is_pre_norm: bool  # norms stand before attention and MLP, and the states pass by them; else after the sum
    is_gated: bool  # the MLP's first matrix makes two halves: act(a) * b
    positions_after_padding: bool  # position ids begin behind the padding id, as RoBERTa's do
    head: str  # of cross-encoders; the names are those of head.py
    half: str  # precision on a GPU: float16 has more digits, bfloat16 a larger range


_BERT = Family(
    names=_BERT_NAMES, is_pre_norm=False, is_gated=False, positions_after_padding=False, head="pooler", half="float16"
)
_ROBERTA = Family(
    names=_BERT_NAMES, is_pre_norm=False, is_gated=False, positions_after_padding=True, head="dense_tanh",
    half="float16",
)  # fmt: skip
_MODERNBERT = Family(
    names=_MODERNBERT_NAMES, is_pre_norm=True, is_gated=True, positions_after_padding=False, head="dense_norm",
    half="bfloat16",
)  # fmt: skip

FAMILIES = {
    "bert": _BERT, "roberta": _ROBERTA, "xlm-roberta": _ROBERTA, "camembert": _ROBERTA, "modernbert": _MODERNBERT
}  # fmt: skip

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "tanh")  # by encoder.py


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    family: Family
    architecture: str  # model_type of config.json
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_tokens: int  # that positions exist for
    position_offset: int  # id of the first position
    num_types: int
    norm_eps: float
    activation: str
    windows: tuple[int | None, ...]  # for each layer: how far a token sees to either side; None: everything
    rope_thetas: tuple[float, ...]  # for each layer; empty: learned positions
    num_labels: int
    classifier_pooling: str  # cls or mean; ModernBERT's
    classifier_activation: str

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads


def read_spec(config: Mapping[str, Any]) -> EncoderSpec:
    """Raises `ModelError`."""
    architecture = config.get("model_type")
    if architecture not in FAMILIES:
        raise ModelError(
            f"encoders of type {architecture!r} cannot be served; {', '.join(FAMILIES)} can, and any that was exported "
            "as model.onnx"
        )
    family = FAMILIES[architecture]
    _check_plain(config)
    offset = whole_number(config, "pad_token_id", 1) + 1 if family.positions_after_padding else 0
    num_layers = number_of_layers(config, "num_hidden_layers")
    windows, thetas = _attention(config, num_layers) if family is _MODERNBERT else ((None,) * num_layers, ())
    spec = EncoderSpec(
        family=family, architecture=architecture, vocab_size=whole_number(config, "vocab_size"),
        hidden_size=whole_number(config, "hidden_size"), num_layers=num_layers,
        num_heads=whole_number(config, "num_attention_heads"),
        intermediate_size=whole_number(config, "intermediate_size"),
        max_tokens=whole_number(config, "max_position_embeddings") - offset, position_offset=offset,
        num_types=whole_number(config, "type_vocab_size", 2) if family.names.types else 0,
        norm_eps=float(config.get("layer_norm_eps", config.get("norm_eps", 1e-5 if thetas else 1e-12))),
        activation=_activation(config.get("hidden_act", config.get("hidden_activation", "gelu"))), windows=windows,
        rope_thetas=thetas, num_labels=num_labels(config),
        classifier_pooling=str(config.get("classifier_pooling", "cls")),
        classifier_activation=_activation(config.get("classifier_activation", "gelu")),
    )  # fmt: skip
    sizes = (spec.hidden_size, spec.num_heads, spec.max_tokens, spec.intermediate_size, spec.vocab_size)
    if min(sizes) < 1 or spec.hidden_size % spec.num_heads:
        raise ModelError(f"the sizes of the model make no sense: {spec.hidden_size} for {spec.num_heads} heads")
    return spec


def num_labels(config: Mapping[str, Any]) -> int:
    labels = config.get("id2label")
    return len(labels) if isinstance(labels, dict) else whole_number(config, "num_labels", 2)


def _check_plain(config: Mapping[str, Any]) -> None:
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise ModelError("relative position embeddings cannot be served; export the model as model.onnx")
    if config.get("is_decoder"):
        raise ModelError("the model is a decoder; serve it with tonle serve MODEL, which has /v1/embeddings, too")


def _activation(name: Any) -> str:
    if name not in ACTIVATIONS:
        raise ModelError(f"the activation {name!r} cannot be served; {', '.join(ACTIVATIONS)} can")
    return str(name)


def _attention(config: Mapping[str, Any], num_layers: int) -> tuple[tuple[int | None, ...], tuple[float, ...]]:
    """ModernBERT's windows and bases of rotary positions, of each layer: most look around, some at everything."""
    every = whole_number(config, "global_attn_every_n_layers", 3)
    types = config.get("layer_types") or [
        "sliding_attention" if place % every else "full_attention" for place in range(num_layers)
    ]
    if len(types) != num_layers:
        raise ModelError(f"the model has {num_layers} layers, but layer_types speaks of {len(types)}")
    rope = config.get("rope_parameters") or {}
    if config.get("rope_scaling") or any(
        part.get("rope_type", "default") != "default" for part in rope.values() if isinstance(part, dict)
    ):
        raise ModelError("stretched rotary positions (rope_scaling) of encoders cannot be served")
    thetas = {
        "full_attention": config.get("global_rope_theta") or 160_000.0,
        "sliding_attention": config.get("local_rope_theta") or 10_000.0,
    }
    for kind in thetas:
        thetas[kind] = (rope.get(kind) or {}).get("rope_theta", thetas[kind])
    half = whole_number(config, "local_attention", 128) // 2
    return (
        tuple(half if kind == "sliding_attention" else None for kind in types),
        tuple(float(thetas[kind]) for kind in types),
    )
