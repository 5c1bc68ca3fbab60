"""From stored matrices to the layout the kernels read. Fits most decoders; says why it does not fit the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tonle.models.cpu.dots import HAS_DOTS, SIGN
from tonle.models.cpu.products import PackedMatrix
from tonle.models.cpu.step import PackedWeights
from tonle.models.cpu.stored import Stored, join
from tonle.models.cpu.vector import GROUP, HALF, ROWS
from tonle.models.cpu.workspace import aligned
from tonle.models.spec import AttentionSpec, LayerSpec, MixerSpec, ModelSpec
from tonle.models.weights import EMBEDDING, FINAL_NORM, LM_HEAD

Array = npt.NDArray[Any]
FetchMatrix = Callable[[str], Stored]  # by our names of tensors
FetchVector = Callable[[str], Array]  # float32


def why_not(spec: ModelSpec) -> str | None:
    """What about this model the kernels cannot do, or None."""
    if spec.hidden_size % GROUP or spec.intermediate_size % GROUP or spec.q_size % GROUP:
        return f"its sizes are not multiples of {GROUP}"
    plain = LayerSpec(
        attention=AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=2, rope=None), mixer=MixerSpec(size=1)
    )
    for layer in spec.layers:
        attention, mixer = layer.attention, layer.mixer
        if attention.o_bias or mixer.bias:
            return "it has biases outside the attention inputs"
        same = replace(plain.attention, num_heads=attention.num_heads, num_kv_heads=attention.num_kv_heads,
                       head_dim=attention.head_dim, rope=spec.ropes[0], window=attention.window,
                       qk_norm=attention.qk_norm, qkv_bias=attention.qkv_bias)  # fmt: skip
        if layer != replace(plain, attention=same, mixer=replace(plain.mixer, size=mixer.size)) or len(spec.ropes) > 1:
            return "its layers are of a kind without compiled kernels"
    return None


def pack(spec: ModelSpec, matrix: FetchMatrix, vector: FetchVector, *, dots: bool = HAS_DOTS) -> PackedWeights:
    """All weights of a decoder. dots: 4- and 8-bit ones are laid out for integer products."""

    def stack(make: Callable[[str], Stored], *, gated: bool = False) -> PackedMatrix:
        return layout([make(f"model.layers.{i}.") for i in range(spec.num_layers)], gated=gated, dots=dots)

    def joined(prefix: str, *names: str) -> Stored:
        return join([matrix(f"{prefix}{name}.weight") for name in names])

    def vectors(name: str) -> Array:
        return np.stack([vector(f"model.layers.{i}.{name}") for i in range(spec.num_layers)]).astype(np.float32)

    qkv_names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    bias = np.zeros((spec.num_layers, spec.q_size + 2 * spec.kv_size), dtype=np.float32)
    attention = spec.layers[0].attention
    if attention.qkv_bias:
        bias = np.concatenate([vectors(f"{name}.bias") for name in qkv_names], axis=1)
    none = np.zeros((spec.num_layers, 0), dtype=np.float32)
    head = matrix(EMBEDDING if spec.tie_embeddings else LM_HEAD)
    return PackedWeights(
        qkv=stack(lambda prefix: joined(prefix, *qkv_names)),
        qkv_bias=np.ascontiguousarray(bias),
        o=stack(lambda prefix: joined(prefix, "self_attn.o_proj")),
        gate_up=stack(lambda prefix: joined(prefix, "mlp.gate_proj", "mlp.up_proj"), gated=True),
        down=stack(lambda prefix: joined(prefix, "mlp.down_proj")),
        head=layout([head], gated=False, dots=dots),
        input_norm=vectors("input_layernorm.weight"),
        mlp_norm=vectors("post_attention_layernorm.weight"),
        final_norm=np.ascontiguousarray(vector(FINAL_NORM), dtype=np.float32),
        q_norm=vectors("self_attn.q_norm.weight") if attention.qk_norm else none,
        k_norm=vectors("self_attn.k_norm.weight") if attention.qk_norm else none,
        windows=np.array([window or 0 for window in spec.windows], dtype=np.int64),
    )


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
