"""From stored matrices to the layout the kernels read. Fits most decoders; says why it does not fit the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tonle.models import layer_order
from tonle.models.cpu.dots import HAS_DOTS
from tonle.models.cpu.exponential import ACTIVATIONS
from tonle.models.cpu.layout import layout, row_order
from tonle.models.cpu.pack_experts import expert_layers, pack_experts
from tonle.models.cpu.pieces import (
    ACTIVATION,
    EXPERTS,
    HEAD_NORMS,
    NORM_AFTER,
    NORM_BEFORE,
    NUM_SETTINGS,
    PER_HEAD,
    PERCEPTRON,
    ROPE,
    ROTATED,
    WHOLE,
    WINDOW,
)
from tonle.models.cpu.products import PackedMatrix
from tonle.models.cpu.step import PackedWeights
from tonle.models.cpu.stored import Stored, join
from tonle.models.cpu.vector import GROUP
from tonle.models.layer_order import FUSED, Piece, Support
from tonle.models.spec import LayerSpec, MixerSpec, ModelSpec, RopeSpec
from tonle.models.weights import EMBEDDING, FINAL_NORM, LM_HEAD, norm_names, scaled

Array = npt.NDArray[Any]
FetchMatrix = Callable[[str], Stored]  # by our names of tensors
FetchVector = Callable[[str], Array]  # float32

_NO_SINK = -1e30  # a score that takes no weight


def support(layer: LayerSpec, piece: Piece) -> Support:
    """What the compiled step can do of this layer. A piece without a fused form sends the whole model to torch."""
    mixer = layer.mixer
    if piece in (Piece.MIX, Piece.ADD_MIXED):
        if mixer.kind == "plain":
            return Support("none", f"there are no compiled kernels for a mixer of kind {mixer.kind!r}")
        # the clamp of swigluoai is known to the kernels of experts alone
        if mixer.activation not in ACTIVATIONS or (mixer.activation == "swigluoai" and _perceptron(mixer)):
            return Support("none", f"there are no compiled kernels for the activation {mixer.activation!r}")
    return FUSED


def _perceptron(mixer: MixerSpec) -> tuple[str, int] | None:
    """Where the gated perceptron is that every token goes through, and its size; None: there are only experts."""
    if mixer.kind != "experts":
        return "mlp", mixer.size
    return ("mlp.shared_expert", mixer.shared_size) if mixer.shared_size else None


def perceptron_size(spec: ModelSpec) -> int:
    """The same in every layer that has one (see `why_not`); 0: none has."""
    return max((found[1] for layer in spec.layers if (found := _perceptron(layer.mixer))), default=0)


def why_not(spec: ModelSpec) -> str | None:
    """What about this model the kernels cannot do, or None."""
    mixers = [layer.mixer for layer in spec.layers]
    sizes = {found[1] for mixer in mixers if (found := _perceptron(mixer))}
    experts = {mixer for mixer in mixers if mixer.kind == "experts"}
    if any(size % GROUP for size in (spec.hidden_size, spec.q_size, *sizes, *(mixer.size for mixer in experts))):
        return f"its sizes are not multiples of {GROUP}"
    if len(sizes) > 1 or len(experts) > 1:
        return "the mixers of its layers have different sizes"
    return layer_order.why_not(spec, support)


def pack(
    spec: ModelSpec, matrix: FetchMatrix, vector: FetchVector, *, dots: bool = HAS_DOTS, head: str | None = None
) -> PackedWeights:
    """All weights of a decoder. dots: 4- and 8-bit ones are laid out for integer products. head: what the last matrix is
    called, if not as in `spec`."""
    matrix, vector = _scaled(spec, matrix, vector)

    def joined(prefix: str, *names: str) -> Stored:
        return join([matrix(f"{prefix}{name}.weight") for name in names])

    def stack(*names: str) -> PackedMatrix:
        layers = [joined(f"model.layers.{i}.", *names) for i in range(spec.num_layers)]
        return layout(layers, gated=False, dots=dots)

    def mixers(*names: str) -> PackedMatrix:
        return layout(_perceptrons(spec, joined, names), gated=len(names) == 2, dots=dots)

    last = matrix(head or (EMBEDDING if spec.tie_embeddings else LM_HEAD))
    return PackedWeights(
        order=np.array([layer_order.layer_order(layer) for layer in spec.layers], dtype=np.int64),
        how=np.array([_settings(spec, index) for index in range(spec.num_layers)], dtype=np.int64),
        scores=np.array(
            [(a.score_scale, a.soft_cap or 0) for a in (layer.attention for layer in spec.layers)], np.float32
        ),
        qkv=stack(*_QKV),
        o=stack("self_attn.o_proj"),
        gate_up=mixers(*_GATE_UP),
        down=mixers("down_proj"),
        experts=pack_experts(spec, matrix, vector, dots=dots),
        head=layout([last], gated=False, dots=dots),
        final_norm=np.ascontiguousarray(vector(FINAL_NORM) + np.float32(spec.gain_offset), dtype=np.float32),
        **_norms(spec, vector),
        **_biases(spec, vector),
    )


def _scaled(spec: ModelSpec, matrix: FetchMatrix, vector: FetchVector) -> tuple[FetchMatrix, FetchVector]:
    """The same with `spec.residual_scale` in them, where it belongs."""
    if spec.residual_scale == 1:
        return matrix, vector

    def scaled_matrix(name: str) -> Stored:
        factor = float(scaled(spec, name, torch.ones(())))
        return matrix(name) if factor == 1 else matrix(name).times(factor)

    return scaled_matrix, lambda name: scaled(spec, name, torch.from_numpy(vector(name))).numpy()


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("gate_proj", "up_proj")


def _perceptrons(spec: ModelSpec, joined: Callable[..., Stored], names: tuple[str, ...]) -> list[Stored]:
    """These matrices of each layer's perceptron. A layer without one has what another has, which is never multiplied; if none
    has one, there is a small part of an expert, so that kernels are the same with shared experts and without."""
    found: list[Stored | None] = []
    for index, layer in enumerate(spec.layers):
        own = _perceptron(layer.mixer)
        found.append(joined(f"model.layers.{index}.{own[0]}.", *names) if own else None)
    some = next((stored for stored in found if stored is not None), None)
    if some is not None:
        return [stored or some for stored in found]
    expert, size = joined("model.layers.0.mlp.experts.0.", *names), spec.layers[0].mixer.size
    if len(names) == 2:
        return [expert.take(np.concatenate((np.arange(GROUP), np.arange(size, size + GROUP))))]
    return [
        Stored(expert.numbers[:, :GROUP], *(None if a is None else a[:, :1] for a in (expert.scale, expert.minimum)))
    ]


def _settings(spec: ModelSpec, index: int) -> list[int]:
    """Of one layer, as `pieces.py` counts them."""
    layer, sparse = spec.layers[index], expert_layers(spec)
    attention, experts = layer.attention, sparse.index(index) if index in sparse else -1
    rope = -1 if attention.rope is None else rotations(spec).index(attention.rope)
    after = norm_names(layer).after_mixer is not None
    rotated = 0 if attention.rope is None else attention.rope.rotated or attention.head_dim
    norms = 0 if not attention.qk_norm else WHOLE if attention.qk_norm_whole else PER_HEAD
    found = {ROPE: rope, ROTATED: rotated, WINDOW: attention.window or 0, NORM_BEFORE: layer.norm_before, NORM_AFTER: after,
             HEAD_NORMS: norms, ACTIVATION: ACTIVATIONS.index(layer.mixer.activation),
             PERCEPTRON: _perceptron(layer.mixer) is not None, EXPERTS: experts}  # fmt: skip
    return [int(found[place]) for place in range(NUM_SETTINGS)]


def rotations(spec: ModelSpec) -> list[RopeSpec]:
    """The different ones; `PackedWeights.how` has places in this list."""
    return [rope for rope in spec.ropes if rope is not None]


def _norms(spec: ModelSpec, vector: FetchVector) -> dict[str, Array]:
    def gains(names: list[str | None], width: int) -> Array:
        """(layers, width); ones where a layer has no such norm."""
        made = np.ones((spec.num_layers, width), dtype=np.float32)
        for i, name in enumerate(names):
            if name is not None:
                found = vector(f"model.layers.{i}.{name}.weight")
                made[i, : len(found)] = found + np.float32(spec.gain_offset)
        return made

    def head_gains(name: str, whole: int) -> Array:
        """As wide as the widest layer's; `whole`: of all heads together."""
        all_of = [layer.attention for layer in spec.layers]
        width = max(0 if not a.qk_norm else whole if a.qk_norm_whole else a.head_dim for a in all_of)
        return gains([f"self_attn.{name}" if a.qk_norm else None for a in all_of], width)

    names = [norm_names(layer) for layer in spec.layers]
    after = spec.hidden_size if any(each.after_mixer for each in names) else 0
    sinks = np.zeros((spec.num_layers, 0), dtype=np.float32)
    if any(layer.attention.sinks for layer in spec.layers):
        sinks = np.full((spec.num_layers, spec.num_heads), _NO_SINK, dtype=np.float32)
        for i, layer in enumerate(spec.layers):
            if layer.attention.sinks:
                sinks[i] = vector(f"model.layers.{i}.self_attn.sinks")
    return {
        "input_norm": gains([each.before_attention for each in names], spec.hidden_size),
        "attention_after": gains([each.after_attention for each in names], after),
        "mlp_norm": gains([each.before_mixer for each in names], spec.hidden_size),
        "mlp_after": gains([each.after_mixer for each in names], after),
        "q_norm": head_gains("q_norm", spec.q_size),
        "k_norm": head_gains("k_norm", spec.kv_size),
        "sinks": sinks,
    }


def _biases(spec: ModelSpec, vector: FetchVector) -> dict[str, Array]:
    def stack(names: tuple[str, ...], has: list[bool], size: int, *, gated: bool = False) -> Array:
        """(layers, rows) in the order of the matrix's blocks, or (layers, 0) if no layer has them."""
        order = row_order(size, gated=gated)
        made = np.zeros((spec.num_layers, len(order) if any(has) else 0), dtype=np.float32)
        for i in np.flatnonzero(has):
            whole = np.concatenate([vector(f"model.layers.{i}.{name}.bias") for name in names])
            made[i] = np.append(whole, np.float32(0))[order]
        return made

    of_qkv = [layer.attention.qkv_bias for layer in spec.layers]
    of_o = [layer.attention.o_bias for layer in spec.layers]
    of_mixer = [layer.mixer.bias and layer.mixer.kind != "experts" for layer in spec.layers]
    gate_up = tuple(f"mlp.{name}" for name in _GATE_UP)
    rows = spec.q_size + 2 * spec.kv_size
    qkv = stack(_QKV, of_qkv, rows)
    return {
        "qkv_bias": qkv if any(of_qkv) else np.zeros((spec.num_layers, rows), dtype=np.float32),
        "o_bias": stack(("self_attn.o_proj",), of_o, spec.hidden_size),
        "gate_up_bias": stack(gate_up, of_mixer, 2 * perceptron_size(spec), gated=True),
        "down_bias": stack(("mlp.down_proj",), of_mixer, spec.hidden_size),
    }
