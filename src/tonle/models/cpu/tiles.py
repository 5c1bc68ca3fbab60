"""Attention over an int8 cache, a tile of positions at a time: which tiles, and where everything lies.

Does: walk tiles, heads and tokens in the order that memory has them. Does not: compute (`cpu_int8_attention.py`), weigh scores
(`kernels.py`).
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import overload

from tonle.models.cpu.cpu_int8_attention import (
    HAS_TILES,
    MOST_DIM,
    PART,
    TILE,
    mix_tile,
    scale_tile,
    score_tile,
    split_query,
)
from tonle.models.cpu.products import OPTIONS, compiled

AHEAD = 3  # tiles before a tile is computed, its keys or values are fetched from memory


def has_tiles(head_dim: int, block_size: int) -> bool:
    """Whether there are kernels for int8 keys and values with heads of this size, in blocks of so many tokens."""
    return HAS_TILES and block_size % TILE == 0 and head_dim % PART == 0 and head_dim <= MOST_DIM


def may_take_tiles(cache: Any) -> bool:
    """Of the type of keys or values: whether some shapes of it are taken in tiles."""
    return bool(HAS_TILES and cache.dtype == types.int8)


def takes_tiles(cache: Any) -> Any:
    """Whether keys and values (blocks, block, kv heads, dim) are."""


@overload(takes_tiles, jit_options=OPTIONS)  # type: ignore[untyped-decorator]
def _takes_tiles(cache: Any) -> Any:
    def fits(cache: Any) -> Any:
        return cache.shape[1] % TILE == 0 and cache.shape[3] % PART == 0 and cache.shape[3] <= MOST_DIM

    def never(cache: Any) -> Any:
        return False

    return fits if may_take_tiles(cache) else never


@compiled
def window_start(position: Any, window: Any) -> Any:
    """The first position that a token at `position` sees; window 0: all."""
    return max(0, position + 1 - window) if window else 0


@compiled
def num_tiles(positions: Any, window: Any) -> Any:
    """How many tiles tokens at these positions see together."""
    return positions[positions.shape[0] - 1] // TILE + 1 - window_start(positions[0], window) // TILE


def score_tiles(q: Any, first: Any, last: Any, keys: Any, key_scales: Any, table: Any, positions: Any, window: Any, scale: Any,
                room: Any, scores: Any, out: Any) -> None:  # fmt: skip
    """Arguments are those of `attend`. All tokens' scores begin with the first tile that any of them sees. out: room for the
    digits of the queries."""


@overload(score_tiles, jit_options=OPTIONS)  # type: ignore[untyped-decorator]
def _score_tiles(q: Any, first: Any, last: Any, keys: Any, key_scales: Any, table: Any, positions: Any, window: Any, scale: Any,
                 room: Any, scores: Any, out: Any) -> Any:  # fmt: skip
    def score(q: Any, first: Any, last: Any, keys: Any, key_scales: Any, table: Any, positions: Any, window: Any, scale: Any,
              room: Any, scores: Any, out: Any) -> None:  # fmt: skip
        count, heads, dim = q.shape
        block_size, num_kv = keys.shape[1], keys.shape[2]
        group = heads // num_kv
        for t in range(count):
            for h in range(first, last):
                split_query(q, (t * heads + h) * dim, out, (t * heads + h) * dim, dim)
        begin, tiles = window_start(positions[0], window) // TILE, num_tiles(positions, window)
        for i in range(tiles):
            at = place_of_tile(table, begin + i, block_size)
            later = place_of_tile(table, begin + min(i + AHEAD, tiles - 1), block_size)
            for kv in range(first // group, (last - 1) // group + 1):
                low, high = max(first, kv * group), min(last, kv * group + group)
                scales = (at // block_size * num_kv + kv) * block_size + at % block_size
                for part in range(dim // PART):
                    score_tile(
                        keys, (at * num_kv + kv) * dim, num_kv * dim, (later - at) * num_kv * dim, key_scales, scales,
                        out, low * dim, heads * dim, dim, part, scores, (low - first) * room + i * TILE,
                        (last - first) * room, room, positions, 0, (begin + i) * TILE, window, scale, count, high - low,
                    )  # fmt: skip

    def nothing(q: Any, first: Any, last: Any, keys: Any, key_scales: Any, table: Any, positions: Any, window: Any, scale: Any,
                room: Any, scores: Any, out: Any) -> None:  # fmt: skip
        pass

    return score if may_take_tiles(keys) else nothing


def mix_tiles(first: Any, last: Any, values: Any, value_scales: Any, table: Any, positions: Any, window: Any, room: Any,
              scores: Any, out: Any) -> None:  # fmt: skip
    """out += weights (in scores) times values."""


@overload(mix_tiles, jit_options=OPTIONS)  # type: ignore[untyped-decorator]
def _mix_tiles(first: Any, last: Any, values: Any, value_scales: Any, table: Any, positions: Any, window: Any, room: Any,
               scores: Any, out: Any) -> Any:  # fmt: skip
    def mix(first: Any, last: Any, values: Any, value_scales: Any, table: Any, positions: Any, window: Any, room: Any,
            scores: Any, out: Any) -> None:  # fmt: skip
        count, heads, dim = out.shape
        block_size, num_kv = values.shape[1], values.shape[2]
        group = heads // num_kv
        begin, tiles = window_start(positions[0], window) // TILE, num_tiles(positions, window)
        for i in range(tiles):
            at = place_of_tile(table, begin + i, block_size)
            later = place_of_tile(table, begin + min(i + AHEAD, tiles - 1), block_size)
            for kv in range(first // group, (last - 1) // group + 1):
                low, high = max(first, kv * group), min(last, kv * group + group)
                scales = (at // block_size * num_kv + kv) * block_size + at % block_size
                weights, step = (low - first) * room + i * TILE, (last - first) * room
                scale_tile(value_scales, scales, scores, weights, step, room, count, high - low)
                mix_tile(
                    values, (at * num_kv + kv) * dim, num_kv * dim, (later - at) * num_kv * dim, scores, weights, step, room,
                    out, low * dim, heads * dim, dim, count, high - low,
                )  # fmt: skip

    def nothing(first: Any, last: Any, values: Any, value_scales: Any, table: Any, positions: Any, window: Any, room: Any,
                scores: Any, out: Any) -> None:  # fmt: skip
        pass

    return mix if may_take_tiles(values) else nothing


@compiled
def place_of_tile(table: Any, tile: Any, block_size: Any) -> Any:
    """Where a tile of a sequence begins in the cache, in positions."""
    return table[tile * TILE // block_size] * block_size + tile * TILE % block_size
