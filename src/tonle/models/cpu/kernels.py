"""Compiled loops: products with packed weights, attention over the paged cache, and what lies between.

Weights are stored in blocks of `ROWS` output rows, k-major inside a block, so that one vector instruction works on
neighbouring rows and weights stream through memory once. A group of `GROUP` consecutive k shares a scale and a minimum:
weight = number * scale + minimum.

    q4    uint8   (blocks, K, ROWS / 2)   row j in the low half of byte j, row j + ROWS / 2 in the high half
    q8    int8    (blocks, K, ROWS)
    bf16  uint16  (blocks, K, ROWS)       the upper half of a float32; scales unused
    f32   float32 (blocks, K, ROWS)       scales unused

Everything here runs without the GIL and allocates nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from tonle.models.cpu.target import prepare_numba

prepare_numba()

from tonle.models.cpu.attention import dots_64, dots_128, mix_64, mix_128  # noqa: E402
from tonle.models.cpu.vector import (  # noqa: E402
    GROUP,
    ROWS,
    add_tile_1,
    add_tile_2,
    add_tile_4,
    row_product,
    unpack,
)

f32 = np.float32
OPTIONS: Any = {"fastmath": {"contract", "reassoc", "nsz", "arcp"}, "boundscheck": False, "nogil": True,
                "error_model": "numpy"}  # fmt: skip
compiled: Any = njit(**OPTIONS)


# -- products


@compiled
def sum_groups(x: Any, sums: Any) -> None:
    """sums[g] = the sum of x over group g."""
    for g in range(x.shape[0] // GROUP):
        total = f32(0)
        for k in range(g * GROUP, (g + 1) * GROUP):
            total += x[k]
        sums[g] = total


@compiled
def block_product(matrix: Any, layer: Any, b: Any, x: Any, sums: Any, total: Any, tile: Any) -> None:
    """total (M, ROWS) = x (M, K) times block b of the matrix; sums: of x's groups, used when M is 1."""
    num_rows, size = x.shape
    groups = size // GROUP
    num_blocks = matrix.weights.shape[1]
    width = matrix.weights.shape[3]
    w = (layer * num_blocks + b) * size * width
    s = (layer * num_blocks + b) * matrix.scale.shape[2] * ROWS
    if num_rows == 1:
        row_product(matrix.weights, w, matrix.scale, s, matrix.minimum, s, x, 0, sums, 0, total, 0, groups)
        return
    for m in range(num_rows):
        for j in range(ROWS):
            total[m, j] = 0
    scaled = matrix.scale.shape[2] > 0
    for g in range(groups):
        k = g * GROUP
        unpack(matrix.weights, w + k * width, matrix.scale, s, matrix.minimum, s, tile, 0)
        if scaled:
            s += ROWS
        m = 0
        while m + 4 <= num_rows:
            add_tile_4(tile, 0, x, m * size + k, size, total, m * ROWS)
            m += 4
        if m + 2 <= num_rows:
            add_tile_2(tile, 0, x, m * size + k, size, total, m * ROWS)
            m += 2
        if m < num_rows:
            add_tile_1(tile, 0, x, m * size + k, size, total, m * ROWS)


# -- what lies between


@compiled
def exp_inplace(values: Any, scratch: Any, count: Any) -> None:
    """values[:count] = exp of them, to float32 precision, in vector instructions. Inputs at most about 88.

    exp(x) = 2**n * exp(r) with n = round(x / ln 2); 2**n is built in the exponent bits of `scratch` (int32).
    """
    powers = scratch.view(np.float32)
    for i in range(count):
        x = max(values[i], f32(-87.0))
        n = np.floor(x * f32(1.44269504) + f32(0.5))
        r = x - n * f32(0.693359375) - n * f32(-2.12194440e-4)
        p = f32(1.9875691500e-4)
        p = p * r + f32(1.3981999507e-3)
        p = p * r + f32(8.3334519073e-3)
        p = p * r + f32(4.1665795894e-2)
        p = p * r + f32(1.6666665459e-1)
        p = p * r + f32(5.0000001201e-1)
        values[i] = p * r * r + r + f32(1.0)
        scratch[i] = (np.int32(n) + np.int32(127)) << np.int32(23)
    for i in range(count):
        values[i] *= powers[i]


@compiled
def normalize(hidden: Any, weight: Any, eps: Any, out: Any) -> None:
    """Root-mean-square norm of each row: (M, hidden) -> (M, hidden)."""
    size = hidden.shape[1]
    for m in range(hidden.shape[0]):
        row, target = hidden[m], out[m]
        square = f32(0)
        for i in range(size):
            square += row[i] * row[i]
        inverse = f32(1.0) / np.sqrt(square / f32(size) + eps)
        for i in range(size):
            target[i] = row[i] * inverse * weight[i]


@compiled
def normalize_head(head: Any, weight: Any, eps: Any) -> None:
    """The same for one head, in place."""
    size = head.shape[0]
    square = f32(0)
    for i in range(size):
        square += head[i] * head[i]
    inverse = f32(1.0) / np.sqrt(square / f32(size) + eps)
    for i in range(size):
        head[i] = head[i] * inverse * weight[i]


@compiled
def rotate_head(head: Any, cos: Any, sin: Any, out: Any) -> None:
    """Turn one head (two halves) by its token's angles; the first half of `sin` is negated already."""
    half = head.shape[0] // 2
    for i in range(half):
        first, second = head[i], head[half + i]
        out[i] = first * cos[i] + second * sin[i]
        out[half + i] = second * cos[half + i] + first * sin[half + i]


@compiled
def attend(q: Any, keys: Any, values: Any, table: Any, start: Any, end: Any, head: Any, scale: Any, scores: Any,
           scratch: Any, out: Any) -> None:  # fmt: skip
    """One query head q (dim,) over positions start..end of its sequence, to out (dim,).

    keys and values: (blocks, block, kv heads, dim) of one layer; table: the sequence's blocks.
    """
    block_size, dim = keys.shape[1], keys.shape[3]
    step = keys.shape[2] * dim
    position = start
    while position < end:
        offset = position % block_size
        count = min(block_size - offset, end - position)
        first = (table[position // block_size] * block_size + offset) * step + head * dim
        if dim == 64:
            dots_64(q, 0, keys, first, step, count, scale, scores, position - start)
        elif dim == 128:
            dots_128(q, 0, keys, first, step, count, scale, scores, position - start)
        else:
            plain_dots(q, keys.reshape(-1)[first:], step, count, scale, scores[position - start :])
        position += count
    inverse = f32(1.0) / soften(scores, scratch, end - start)
    for i in range(dim):
        out[i] = 0
    position = start
    while position < end:
        offset = position % block_size
        count = min(block_size - offset, end - position)
        first = (table[position // block_size] * block_size + offset) * step + head * dim
        if dim == 64:
            mix_64(values, first, step, count, scores, position - start, out, 0)
        elif dim == 128:
            mix_128(values, first, step, count, scores, position - start, out, 0)
        else:
            plain_mix(values.reshape(-1)[first:], step, count, scores[position - start :], out)
        position += count
    for i in range(dim):
        out[i] *= inverse


@compiled
def soften(scores: Any, scratch: Any, count: Any) -> Any:
    """scores[:count] = exp(scores - the best of them); returns their sum."""
    best = scores[0]
    for i in range(count):
        best = max(best, scores[i])
    for i in range(count):
        scores[i] -= best
    exp_inplace(scores, scratch, count)
    total = f32(0)
    for i in range(count):
        total += scores[i]
    return total


@compiled
def plain_dots(q: Any, keys: Any, step: Any, count: Any, scale: Any, scores: Any) -> None:
    for position in range(count):
        dot = f32(0)
        for i in range(q.shape[0]):
            dot += q[i] * keys[position * step + i]
        scores[position] = dot * scale


@compiled
def plain_mix(values: Any, step: Any, count: Any, scores: Any, out: Any) -> None:
    for position in range(count):
        for i in range(out.shape[0]):
            out[i] += scores[position] * values[position * step + i]
