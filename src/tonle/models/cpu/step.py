"""The whole step of a decoder, all layers, as one compiled function that every thread of a team runs.

Work is divided by output rows (products) and by token and head (attention); the threads meet where one part needs all of
another. Norms are cheap and every thread computes its own, which saves a meeting each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from tonle.models.cpu.kernels import (
    OPTIONS,
    attend,
    block_product,
    compiled,
    exp_inplace,
    f32,
    normalize,
    normalize_head,
    rotate_head,
    sum_groups,
)
from tonle.models.cpu.team import meet
from tonle.models.cpu.vector import HALF, ROWS


class Matrix(NamedTuple):
    """One kind of matrix of all layers. weights (layers, blocks, K, .), scale and minimum (layers, blocks, groups, ROWS)."""

    weights: Any
    scale: Any
    minimum: Any


class Packed(NamedTuple):
    """A decoder's weights for `forward`."""

    qkv: Matrix
    qkv_bias: Any  # (layers, rows)
    o: Matrix
    gate_up: Matrix  # in every block: HALF rows of gate, then the HALF rows of up that belong to them
    down: Matrix
    head: Matrix  # one layer: the vocabulary
    input_norm: Any  # (layers, hidden)
    mlp_norm: Any
    final_norm: Any  # (hidden,)
    q_norm: Any  # (layers, dim), or (layers, 0) without
    k_norm: Any
    windows: Any  # (layers,) int64; 0 = all


class Buffers(NamedTuple):
    """What a step writes. Shared, except those whose first dimension is the thread."""

    hidden: Any  # (T, hidden): the residual stream; holds the embeddings on entry
    qkv: Any  # (T, rows)
    q: Any  # (T, heads, dim) rotated
    mixed: Any  # (T, heads * dim) attention's output
    act: Any  # (T, intermediate)
    logits: Any  # (S, vocabulary rounded up to blocks)
    normed: Any  # (threads, T, hidden)
    total: Any  # (threads, T, ROWS)
    tile: Any  # (threads, GROUP, ROWS)
    sums: Any  # (threads, most groups)
    scores: Any  # (threads, longest context)
    scratch: Any  # (threads, longest context) int32


class Inputs(NamedTuple):
    """One step: T tokens, S of them with logits wanted."""

    row_of: Any  # (T,) which block table
    positions: Any  # (T,)
    slots: Any  # (T,)
    tables: Any  # (R, blocks) int32
    wanted: Any  # (S,) which tokens
    cos: Any  # (T, dim)
    sin: Any


@compiled
def _share(count: Any, member: Any, size: Any) -> Any:
    return count * member // size, count * (member + 1) // size


@compiled
def _store(
    matrix: Matrix, layer: Any, x: Any, out: Any, member: Any, size: Any, total: Any, tile: Any, sums: Any
) -> None:
    """out (T, rows) = x times the matrix."""
    first, last = _share(matrix.weights.shape[1], member, size)
    sum_groups(x[0], sums)
    for b in range(first, last):
        block_product(matrix, layer, b, x, sums, total, tile)
        for m in range(x.shape[0]):
            for j in range(ROWS):
                out[m, b * ROWS + j] = total[m, j]


@compiled
def _add(
    matrix: Matrix, layer: Any, x: Any, out: Any, member: Any, size: Any, total: Any, tile: Any, sums: Any
) -> None:
    """out (T, rows) += x times the matrix; rows need not fill the last block."""
    first, last = _share(matrix.weights.shape[1], member, size)
    sum_groups(x[0], sums)
    for b in range(first, last):
        block_product(matrix, layer, b, x, sums, total, tile)
        width = min(ROWS, out.shape[1] - b * ROWS)
        for m in range(x.shape[0]):
            for j in range(width):
                out[m, b * ROWS + j] += total[m, j]


@compiled
def _gate(
    matrix: Matrix, layer: Any, x: Any, out: Any, member: Any, size: Any, total: Any, tile: Any, sums: Any, scratch: Any
) -> None:
    """out (T, intermediate) = silu(gate) * up."""
    first, last = _share(matrix.weights.shape[1], member, size)
    sum_groups(x[0], sums)
    decay = tile[0]
    for b in range(first, last):
        block_product(matrix, layer, b, x, sums, total, tile)
        width = min(HALF, out.shape[1] - b * HALF)
        for m in range(x.shape[0]):
            for j in range(HALF):
                decay[j] = min(-total[m, j], f32(80.0))
            exp_inplace(decay, scratch, HALF)
            for j in range(width):
                out[m, b * HALF + j] = total[m, j] / (f32(1.0) + decay[j]) * total[m, HALF + j]


@compiled
def _spread(packed: Packed, layer: Any, step: Inputs, buffers: Buffers, keys: Any, values: Any, eps: Any, member: Any,
            size: Any) -> None:  # fmt: skip
    """From the qkv product: rotated queries to their buffer, rotated keys and values to the cache."""
    num_heads, dim = buffers.q.shape[1], buffers.q.shape[2]
    num_kv = keys.shape[2]
    block_size = keys.shape[1]
    per_token = num_heads + 2 * num_kv
    first, last = _share(step.positions.shape[0] * per_token, member, size)
    for item in range(first, last):
        t, h = item // per_token, item % per_token
        head = buffers.qkv[t, h * dim : (h + 1) * dim]
        bias = packed.qkv_bias[layer, h * dim : (h + 1) * dim]
        for i in range(dim):
            head[i] += bias[i]
        block, offset = step.slots[t] // block_size, step.slots[t] % block_size
        if h < num_heads:
            if packed.q_norm.shape[1]:
                normalize_head(head, packed.q_norm[layer], eps)
            rotate_head(head, step.cos[t], step.sin[t], buffers.q[t, h])
        elif h < num_heads + num_kv:
            if packed.k_norm.shape[1]:
                normalize_head(head, packed.k_norm[layer], eps)
            rotate_head(head, step.cos[t], step.sin[t], keys[block, offset, h - num_heads])
        else:
            target = values[block, offset, h - num_heads - num_kv]
            for i in range(dim):
                target[i] = head[i]


@compiled
def _mix(window: Any, step: Inputs, buffers: Buffers, keys: Any, values: Any, member: Any, size: Any) -> None:
    """Attention of every token's heads."""
    num_heads, dim = buffers.q.shape[1], buffers.q.shape[2]
    group = num_heads // keys.shape[2]
    scale = f32(1.0) / np.sqrt(f32(dim))
    first, last = _share(step.positions.shape[0] * num_heads, member, size)
    for item in range(first, last):
        t, h = item // num_heads, item % num_heads
        end = step.positions[t] + 1
        start = max(0, end - window) if window else 0
        attend(buffers.q[t, h], keys, values, step.tables[step.row_of[t]], start, end, h // group, scale,
               buffers.scores[member], buffers.scratch[member], buffers.mixed[t, h * dim : (h + 1) * dim])  # fmt: skip


@njit(**OPTIONS, cache=True)  # type: ignore[untyped-decorator]
def forward(packed: Packed, step: Inputs, buffers: Buffers, keys: Any, values: Any, eps: Any, counter: Any, member: Any,
            size: Any) -> None:  # fmt: skip
    """All layers, then the wanted logits. keys and values: (layers, blocks, block, kv heads, dim)."""
    normed, total = buffers.normed[member], buffers.total[member]
    tile, sums, scratch = buffers.tile[member], buffers.sums[member], buffers.scratch[member]
    met = 0
    for layer in range(packed.input_norm.shape[0]):
        normalize(buffers.hidden, packed.input_norm[layer], eps, normed)
        _store(packed.qkv, layer, normed, buffers.qkv, member, size, total, tile, sums)
        met += size
        meet(counter, met)
        _spread(packed, layer, step, buffers, keys[layer], values[layer], eps, member, size)
        met += size
        meet(counter, met)
        _mix(packed.windows[layer], step, buffers, keys[layer], values[layer], member, size)
        met += size
        meet(counter, met)
        _add(packed.o, layer, buffers.mixed, buffers.hidden, member, size, total, tile, sums)
        met += size
        meet(counter, met)
        normalize(buffers.hidden, packed.mlp_norm[layer], eps, normed)
        _gate(packed.gate_up, layer, normed, buffers.act, member, size, total, tile, sums, scratch)
        met += size
        meet(counter, met)
        _add(packed.down, layer, buffers.act, buffers.hidden, member, size, total, tile, sums)
        met += size
        meet(counter, met)
    num_wanted = step.wanted.shape[0]
    if num_wanted:
        for s in range(num_wanted):
            normalize(buffers.hidden[step.wanted[s] : step.wanted[s] + 1], packed.final_norm, eps, normed[s : s + 1])
        _store(packed.head, 0, normed[:num_wanted], buffers.logits, member, size, total, tile, sums)


@njit(**OPTIONS, cache=True)  # type: ignore[untyped-decorator]
def product(matrix: Matrix, layer: Any, x: Any, out: Any, member: Any, size: Any, buffers: Buffers) -> None:
    """One matrix alone, for measuring and for tests: out (T, blocks * ROWS) = x (T, K) times it."""
    _store(matrix, layer, x, out, member, size, buffers.total[member], buffers.tile[member],
           buffers.sums[member])  # fmt: skip
