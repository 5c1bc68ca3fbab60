"""What lies between the products: norms, rotation, attention over the paged cache.

Everything here runs without the GIL and allocates nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import overload

from tonle.models.cpu.cpu_attention import cap_scores, dots_64, dots_128, dots_any, mix_64, mix_128, mix_any, soften
from tonle.models.cpu.cpu_cache import block_rows
from tonle.models.cpu.cpu_int8_attention import TILE
from tonle.models.cpu.products import OPTIONS, compiled, f32
from tonle.models.cpu.tiles import may_take_tiles, mix_tiles, num_tiles, score_tiles, takes_tiles, window_start
from tonle.models.cpu.vector import LANES


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
def rotate_head(head: Any, rotated: Any, cos: Any, sin: Any, out: Any) -> None:
    """Turn the first numbers of a head (two halves) by its token's angles; the first half of `sin` is negated already."""
    half = rotated // 2
    for i in range(half):
        first, second = head[i], head[half + i]
        out[i] = first * cos[i] + second * sin[i]
        out[half + i] = second * cos[half + i] + first * sin[half + i]


@compiled
def attend(
    q: Any, first: Any, last: Any, keys: Any, values: Any, key_scales: Any, value_scales: Any, unpacked: Any, table: Any,
    positions: Any, window: Any, scale: Any, cap: Any, sinks: Any, room: Any, scores: Any, out: Any,
) -> None:  # fmt: skip
    """Query heads first..last of consecutive tokens of one sequence, q (tokens, heads, dim), to out, of the same shape.

    keys and values: (blocks, block, kv heads, dim) of one layer, scales and room as in `Cache`; table: the sequence's blocks;
    positions: of the tokens.
    All tokens and heads take a block before the next one is touched: memory is read once and in order. scores: flat, a row
    of `room` for each token and head, see `row_room`. cap: scores are kept within it, 0 = as they are; sinks: a score of each
    head that takes weight and gives no value, or empty.
    """
    count, _, dim = q.shape
    rows = last - first
    tiled = takes_tiles(keys)
    if tiled:
        score_tiles(q, first, last, keys, key_scales, table, positions, window, scale, room, scores, out)
    else:
        _score(q, first, last, keys, key_scales, unpacked, table, positions, window, scale, room, scores)
    num_sinks = min(sinks.shape[0], 1)
    for t in range(count):
        size = positions[t] + 1 - window_start(positions[t], window)
        if tiled:
            size = num_tiles(positions, window) * TILE
        for h in range(first, last):
            to = (t * rows + h - first) * room
            if cap > 0:
                cap_scores(scores, to, size, cap)
            if num_sinks:
                scores[to + size] = sinks[h]
            scores[to + room - 1] = f32(1.0) / soften(scores, to, size + num_sinks)
            for i in range(dim):
                out[t, h, i] = 0
    if tiled:
        mix_tiles(first, last, values, value_scales, table, positions, window, room, scores, out)
    else:
        _mix(first, last, values, value_scales, unpacked, table, positions, window, room, scores, out)
    for t in range(count):
        for h in range(first, last):
            inverse = scores[(t * rows + h - first) * room + room - 1]
            for i in range(dim):
                out[t, h, i] *= inverse


@compiled
def _score(q: Any, first: Any, last: Any, keys: Any, key_scales: Any, unpacked: Any, table: Any, positions: Any, window: Any,
           scale: Any, room: Any, scores: Any) -> None:  # fmt: skip
    """A token's scores begin with the first position that it sees."""
    count, heads, _ = q.shape
    block_size, group = keys.shape[1], heads // keys.shape[2]
    begin, end = window_start(positions[0], window), positions[count - 1] + 1
    for block in range(begin // block_size, -(-end // block_size)):
        seen = min(end - block * block_size, block_size)
        flat, place, step, apart = block_rows(
            keys, key_scales, unpacked, table[block], first // group, (last - 1) // group + 1, seen
        )
        for t in range(count):
            start, low, high = seen_of_block(block, block_size, positions[t], window)
            if high <= low:
                continue
            for h in range(first, last):
                at = place + low % block_size * step + h // group * apart
                to = (t * (last - first) + h - first) * room + low - start
                dots_of(keys, q, t, h, flat, at, step, high - low, scale, scores, to)


@compiled
def _mix(first: Any, last: Any, values: Any, value_scales: Any, unpacked: Any, table: Any, positions: Any, window: Any, room: Any,
         scores: Any, out: Any) -> None:  # fmt: skip
    """out += weights (in scores) times values."""
    count, heads, _ = out.shape
    block_size, group = values.shape[1], heads // values.shape[2]
    begin, end = window_start(positions[0], window), positions[count - 1] + 1
    for block in range(begin // block_size, -(-end // block_size)):
        seen = min(end - block * block_size, block_size)
        flat, place, step, apart = block_rows(
            values, value_scales, unpacked, table[block], first // group, (last - 1) // group + 1, seen
        )
        for t in range(count):
            start, low, high = seen_of_block(block, block_size, positions[t], window)
            if high <= low:
                continue
            for h in range(first, last):
                at = place + low % block_size * step + h // group * apart
                to = (t * (last - first) + h - first) * room + low - start
                mix_of(values, flat, at, step, high - low, scores, to, out, t, h)


def dots_of(
    cache: Any, q: Any, t: Any, h: Any, keys: Any, k: Any, step: Any, count: Any, scale: Any, scores: Any, s: Any
) -> None:
    """scores[s + i] = scale * (q[t, h] . keys of position i), which lie `step` apart from k on. cache: where they come from."""


@overload(dots_of, jit_options=OPTIONS, inline="always")  # type: ignore[untyped-decorator]
def _dots_of(
    cache: Any, q: Any, t: Any, h: Any, keys: Any, k: Any, step: Any, count: Any, scale: Any, scores: Any, s: Any
) -> Any:
    def dots(
        cache: Any, q: Any, t: Any, h: Any, keys: Any, k: Any, step: Any, count: Any, scale: Any, scores: Any, s: Any
    ) -> None:
        heads, dim = q.shape[1], q.shape[2]
        if dim == 64:
            dots_64(q, (t * heads + h) * dim, keys, k, step, count, scale, scores, s)
        elif dim == 128:
            dots_128(q, (t * heads + h) * dim, keys, k, step, count, scale, scores, s)
        else:
            plain_dots(q[t, h], keys[k:], step, count, scale, scores[s:])

    def any_dots(
        cache: Any, q: Any, t: Any, h: Any, keys: Any, k: Any, step: Any, count: Any, scale: Any, scores: Any, s: Any
    ) -> None:
        plain_dots(q[t, h], keys[k:], step, count, scale, scores[s:])

    return any_dots if may_take_tiles(cache) else dots


def mix_of(
    cache: Any, values: Any, v: Any, step: Any, count: Any, scores: Any, s: Any, out: Any, t: Any, h: Any
) -> None:
    """out[t, h] += the sum of scores[s + i] * values of position i. As above."""


@overload(mix_of, jit_options=OPTIONS, inline="always")  # type: ignore[untyped-decorator]
def _mix_of(
    cache: Any, values: Any, v: Any, step: Any, count: Any, scores: Any, s: Any, out: Any, t: Any, h: Any
) -> Any:
    def mix(
        cache: Any, values: Any, v: Any, step: Any, count: Any, scores: Any, s: Any, out: Any, t: Any, h: Any
    ) -> None:
        heads, dim = out.shape[1], out.shape[2]
        if dim == 64:
            mix_64(values, v, step, count, scores, s, out, (t * heads + h) * dim)
        elif dim == 128:
            mix_128(values, v, step, count, scores, s, out, (t * heads + h) * dim)
        else:
            plain_mix(values[v:], step, count, scores[s:], out[t, h])

    def any_mix(
        cache: Any, values: Any, v: Any, step: Any, count: Any, scores: Any, s: Any, out: Any, t: Any, h: Any
    ) -> None:
        plain_mix(values[v:], step, count, scores[s:], out[t, h])

    return any_mix if may_take_tiles(cache) else mix


@compiled
def seen_of_block(block: Any, block_size: Any, position: Any, window: Any) -> Any:
    """What a token at `position` sees: from where on in all, and from where to where in this block."""
    start = window_start(position, window)
    return start, max(start, block * block_size), min(position + 1, (block + 1) * block_size)


@compiled
def row_room(longest: Any) -> Any:
    """What a row of scores takes: so many in whole vectors, and a vector for a sink and, in the end, the inverse of the sum."""
    return (longest + LANES - 1) // LANES * LANES + LANES


@compiled
def plain_dots(q: Any, keys: Any, step: Any, count: Any, scale: Any, scores: Any) -> None:
    """scores[i] = scale * (q . keys of position i), for heads of any size."""
    if q.shape[0] % LANES == 0:
        dots_any(q, 0, keys, 0, step, count, scale, scores, 0, q.shape[0])
        return
    for position in range(count):
        dot = f32(0)
        for i in range(q.shape[0]):
            dot += q[i] * keys[position * step + i]
        scores[position] = dot * scale


@compiled
def plain_mix(values: Any, step: Any, count: Any, scores: Any, out: Any) -> None:
    """out += the sum of scores[i] * values of position i, for heads of any size."""
    if out.shape[0] % LANES == 0:
        mix_any(values, 0, step, count, scores, 0, out, 0, out.shape[0])
        return
    for position in range(count):
        for i in range(out.shape[0]):
            out[i] += scores[position] * values[position * step + i]
