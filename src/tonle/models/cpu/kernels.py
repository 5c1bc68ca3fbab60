"""What lies between the products: norms, rotation, attention over the paged cache.

Everything here runs without the GIL and allocates nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tonle.models.cpu.attention import dots_64, dots_128, mix_64, mix_128
from tonle.models.cpu.products import compiled, f32


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
def normalize(row: Any, weight: Any, eps: Any, out: Any) -> None:
    """Root-mean-square norm of one row (hidden,), to out."""
    size = row.shape[0]
    square = f32(0)
    for i in range(size):
        square += row[i] * row[i]
    inverse = f32(1.0) / np.sqrt(square / f32(size) + eps)
    for i in range(size):
        out[i] = row[i] * inverse * weight[i]


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
