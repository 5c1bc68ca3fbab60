"""From stored matrices to the layout the kernels read. Fits most decoders; says why it does not fit the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tonle.models import layer_order
from tonle.models.cpu.dots import HAS_DOTS, SIGN
from tonle.models.cpu.exponential import ACTIVATIONS
from tonle.models.cpu.pieces import ACTIVATION, HEAD_NORMS, NORM_AFTER, NORM_BEFORE, NUM_SETTINGS, ROPE, WINDOW
from tonle.models.cpu.products import PackedMatrix
from tonle.models.cpu.step import PackedWeights
from tonle.models.cpu.stored import Stored, join
from tonle.models.cpu.vector import GROUP, HALF, ROWS
from tonle.models.cpu.workspace import aligned
from tonle.models.layer_order import FUSED, Piece, Support
from tonle.models.spec import LayerSpec, ModelSpec, RopeSpec
from tonle.models.weights import EMBEDDING, FINAL_NORM, LM_HEAD, norm_names

Array = npt.NDArray[Any]
FetchMatrix = Callable[[str], Stored]  # by our names of tensors
FetchVector = Callable[[str], Array]  # float32

_NO_SINK = -1e30  # a score that takes no weight


def support(layer: LayerSpec, piece: Piece) -> Support:
    """What the compiled step can do of this layer. A piece without a fused form sends the whole model to torch."""
    mixer = layer.mixer
    if piece in (Piece.MIX, Piece.ADD_MIXED):
        if mixer.kind != "gated":
            return Support("none", f"there are no compiled kernels for a mixer of kind {mixer.kind!r}")
        if mixer.activation not in ACTIVATIONS:
            return Support("none", f"there are no compiled kernels for the activation {mixer.activation!r}")
    return FUSED


def why_not(spec: ModelSpec) -> str | None:
    """What about this model the kernels cannot do, or None."""
    if spec.hidden_size % GROUP or spec.intermediate_size % GROUP or spec.q_size % GROUP:
        return f"its sizes are not multiples of {GROUP}"
    if len({layer.mixer.size for layer in spec.layers}) > 1:
        return "the mixers of its layers have different sizes"
    return layer_order.why_not(spec, support)


def pack(spec: ModelSpec, matrix: FetchMatrix, vector: FetchVector, *, dots: bool = HAS_DOTS) -> PackedWeights:
    """All weights of a decoder. dots: 4- and 8-bit ones are laid out for integer products."""

    def stack(make: Callable[[str], Stored], *, gated: bool = False) -> PackedMatrix:
        return layout([make(f"model.layers.{i}.") for i in range(spec.num_layers)], gated=gated, dots=dots)

    def joined(prefix: str, *names: str) -> Stored:
        return join([matrix(f"{prefix}{name}.weight") for name in names])

    head = matrix(EMBEDDING if spec.tie_embeddings else LM_HEAD)
    return PackedWeights(
        order=np.array([layer_order.layer_order(layer) for layer in spec.layers], dtype=np.int64),
        how=np.array([_settings(spec, layer) for layer in spec.layers], dtype=np.int64),
        scores=np.array(
            [(a.score_scale, a.soft_cap or 0) for a in (layer.attention for layer in spec.layers)], np.float32
        ),
        qkv=stack(lambda prefix: joined(prefix, *_QKV)),
        o=stack(lambda prefix: joined(prefix, "self_attn.o_proj")),
        gate_up=stack(lambda prefix: joined(prefix, *_GATE_UP), gated=True),
        down=stack(lambda prefix: joined(prefix, "mlp.down_proj")),
        head=layout([head], gated=False, dots=dots),
        final_norm=np.ascontiguousarray(vector(FINAL_NORM) + np.float32(spec.gain_offset), dtype=np.float32),
        **_norms(spec, vector),
        **_biases(spec, vector),
    )


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


def _settings(spec: ModelSpec, layer: LayerSpec) -> list[int]:
    """As `pieces.py` counts them."""
    attention = layer.attention
    rope = -1 if attention.rope is None else rotations(spec).index(attention.rope)
    after = norm_names(layer).after_mixer is not None
    found = {ROPE: rope, WINDOW: attention.window or 0, NORM_BEFORE: layer.norm_before, NORM_AFTER: after,
             HEAD_NORMS: attention.qk_norm, ACTIVATION: ACTIVATIONS.index(layer.mixer.activation)}  # fmt: skip
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
                made[i] = vector(f"model.layers.{i}.{name}.weight") + np.float32(spec.gain_offset)
        return made

    def head_gains(name: str) -> Array:
        has = [layer.attention.qk_norm for layer in spec.layers]
        return gains([f"self_attn.{name}" if each else None for each in has], spec.head_dim if any(has) else 0)

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
        "q_norm": head_gains("q_norm"),
        "k_norm": head_gains("k_norm"),
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
    of_o, of_mixer = [layer.attention.o_bias for layer in spec.layers], [layer.mixer.bias for layer in spec.layers]
    rows = spec.q_size + 2 * spec.kv_size
    qkv = stack(_QKV, of_qkv, rows)
    return {
        "qkv_bias": qkv if any(of_qkv) else np.zeros((spec.num_layers, rows), dtype=np.float32),
        "o_bias": stack(("self_attn.o_proj",), of_o, spec.hidden_size),
        "gate_up_bias": stack(_GATE_UP, of_mixer, 2 * spec.intermediate_size, gated=True),
        "down_bias": stack(("mlp.down_proj",), of_mixer, spec.hidden_size),
    }


def layout(layers: list[Stored], *, gated: bool, dots: bool) -> PackedMatrix:
    """The layouts of `products.py`, aligned to cache lines; missing rows are zero."""
    widest = join(
        [Stored(a.numbers[:1], *(None if s is None else s[:1] for s in (a.scale, a.minimum))) for a in layers]
    )
    dtype = widest.numbers.dtype
    dots = dots and widest.scale is not None
    rows, columns = layers[0].shape
    order = row_order(rows, gated=gated)  # (blocks * ROWS,) source row, or `rows` for none
    num_blocks = len(order) // ROWS
    width = HALF if dtype == np.uint8 else ROWS
    weights = aligned((len(layers), num_blocks, *((columns // 4, width, 4) if dots else (columns, width))), dtype)
    groups = columns // GROUP if widest.scale is not None else 0
    for i, stored in enumerate(layers):
        numbers = stored.widen(dtype).numbers
        blocks = _fours(numbers, order) if dots else _blocks(numbers, order)  # (blocks, K, ROWS), or in fours
        if dtype == np.uint8:
            low, high = (blocks[:, :, :HALF], blocks[:, :, HALF:])
            np.bitwise_or(low, high << 4, out=weights[i])
        elif dots:
            np.bitwise_xor(blocks.view(np.uint8), SIGN, out=weights[i].view(np.uint8))  # adds SIGN
        else:
            weights[i] = blocks
    scale = _factors([layer.scale for layer in layers], order, (len(layers), num_blocks, groups, ROWS))
    minimum = _factors([layer.minimum for layer in layers], order, (len(layers), num_blocks, groups, ROWS))
    return PackedMatrix(weights, scale, minimum if minimum.any() else np.zeros((1, 1, 1, 1), dtype=np.bool_))


def _factors(layers: list[Array | None], order: Array, shape: tuple[int, ...]) -> Array:
    """Scales or minimums in blocks: as float16 bits where nothing is lost by it, which spares memory traffic."""
    factors = aligned(shape, np.dtype(np.float32))
    for i, values in enumerate(layers):
        if values is not None:
            factors[i] = _blocks(values, order)
    short = factors.astype(np.float16)
    if not np.array_equal(short.astype(np.float32), factors):
        return factors
    bits = aligned(shape, np.dtype(np.uint16))
    bits[...] = short.view(np.uint16)
    return bits


def row_order(rows: int, *, gated: bool) -> Array:
    """Which stored row goes where. Gated: each block has HALF gate rows, then their up rows."""
    if not gated:
        padded = -(-rows // ROWS) * ROWS
        return np.minimum(np.arange(padded), rows)
    half = rows // 2
    padded = -(-half // HALF) * HALF
    places = np.arange(padded).reshape(-1, HALF)  # (blocks, HALF)
    gate = np.where(places < half, places, rows)
    up = np.where(places < half, places + half, rows)
    return np.concatenate((gate, up), axis=1).reshape(-1)


def _blocks(values: Array, order: Array) -> Array:
    """(N, K) -> (blocks, K, ROWS), rows in `order`; row N is zeros."""
    if int(order.max()) >= len(values):
        values = np.concatenate((values, np.zeros_like(values[:1])))
    chosen = values[order].reshape(-1, ROWS, values.shape[1])
    return chosen.transpose(0, 2, 1)


def _fours(values: Array, order: Array) -> Array:
    """(N, K) -> (blocks, K / 4, ROWS, 4), likewise."""
    by_row = _blocks(values, order).transpose(0, 2, 1)  # (blocks, ROWS, K)
    return np.ascontiguousarray(by_row.reshape(len(by_row), ROWS, -1, 4).transpose(0, 2, 1, 3))
