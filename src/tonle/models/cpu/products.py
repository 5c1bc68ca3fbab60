"""Products with packed weights. A matrix's layout decides in which form it takes its input.

Weights are stored in blocks of `ROWS` output rows, so that one vector instruction works on neighbouring rows and weights
stream through memory once. A group of `GROUP` consecutive k shares a scale and a minimum: weight = number * scale + minimum.

k-major, multiplied as float32 (input: `Floats`):
    q4    uint8   (blocks, K, ROWS / 2)       row j in the low half of byte j, row j + ROWS / 2 in the high half
    q8    int8    (blocks, K, ROWS)
    bf16  uint16  (blocks, K, ROWS)           the upper half of a float32; scales unused
    f32   float32 (blocks, K, ROWS)           scales unused
in fours of k, multiplied as integers (input: `Digits`), where the processor has an instruction for it:
    q4    uint8   (blocks, K / 4, ROWS / 2, 4)   halves of bytes as above
    q8    int8    (blocks, K / 4, ROWS, 4)       with 128 added, read as unsigned

Everything here runs without the GIL and allocates nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit, types
from numba.extending import overload

from tonle.models.cpu.numba_setup import prepare_numba

prepare_numba()

from tonle.models.cpu.dots import (  # noqa: E402
    add_dots_1,
    add_dots_2,
    add_dots_4,
    add_high_1,
    add_high_2,
    add_high_4,
    add_low_1,
    any_of_four,
    read_factors,
    split_group,
    unpack_bytes,
)
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
# _nrt: no reference counts. Nothing is allocated, and counting costs more than a small group of weights.
OPTIONS: Any = {"fastmath": {"contract", "reassoc", "nsz", "arcp"}, "boundscheck": False, "nogil": True,
                "error_model": "numpy", "_nrt": False}  # fmt: skip
compiled: Any = njit(**OPTIONS)
# Not compiled apart, which takes seconds for a function that has much below it. Cannot have branches that depend on types.
inlined: Any = njit(**OPTIONS, inline="always")

CHUNK = 64  # rows of x at a time: their sums (16 KiB) stay in the first-level cache


class PackedMatrix(NamedTuple):
    """One kind of matrix of all layers. weights (layers, blocks, K..., .), scale and minimum (layers, blocks, groups, ROWS)."""

    weights: Any
    scale: Any
    minimum: Any


def num_inputs(matrix: PackedMatrix) -> int:
    """K."""
    shape = matrix.weights.shape
    return int(shape[2] * (4 if len(shape) == 5 else 1))


class Floats(NamedTuple):
    """Rows of x for k-major weights."""

    values: Any  # (T, K)
    sums: Any  # (T, groups): of x over each group


class Digits(NamedTuple):
    """Rows of x for weights in fours: x = scale * (high + low / 256)."""

    high: Any  # (T, K) int8
    low: Any  # (T, K) int8; 0 in groups that are not wide
    scale: Any  # (T, groups)
    sums: Any  # (T, groups): of x over each group
    wide: Any  # (groups, T) uint8: whether a group is wide, see `dots.py`; bool, of any size: every group is


class Scratch(NamedTuple):
    """One thread's working memory."""

    total: Any  # (CHUNK, ROWS) sums of a block
    tile: Any  # (GROUP, ROWS) a group of weights as float32
    small: Any  # (GROUP * ROWS,) uint8: the same as bytes
    factors: Any  # (2, ROWS)
    row: Any  # (widest,) one row of x before it takes its form


def set_group(x: Any, m: Any, g: Any, values: Any, at: Any) -> None:
    """Group g of row m of x (`Floats` or `Digits`) = GROUP numbers of `values`, taken as flat memory, from `at` on."""


@overload(set_group, jit_options=OPTIONS)  # type: ignore[untyped-decorator]
def _set_group(x: Any, m: Any, g: Any, values: Any, at: Any) -> Any:
    if x.instance_class is Digits:

        def split(x: Any, m: Any, g: Any, values: Any, at: Any) -> None:
            to, place = m * x.high.shape[1] + g * GROUP, m * x.scale.shape[1] + g
            split_group(
                values, at, x.high, to, x.low, to, x.scale, place, x.sums, place, x.wide, g * x.wide.shape[1] + m
            )

        return split

    def copy(x: Any, m: Any, g: Any, values: Any, at: Any) -> None:
        flat = values.reshape(-1)
        total = f32(0)
        for i in range(GROUP):
            value = flat[at + i]
            x.values[m, g * GROUP + i] = value
            total += value
        x.sums[m, g] = total

    return copy


def block_product(matrix: Any, layer: Any, b: Any, x: Any, first: Any, last: Any, scratch: Any) -> None:
    """scratch.total[: last - first] = rows first..last of x times block b of the matrix. At most CHUNK rows."""


@overload(block_product, jit_options=OPTIONS)  # type: ignore[untyped-decorator]
def _block_product(matrix: Any, layer: Any, b: Any, x: Any, first: Any, last: Any, scratch: Any) -> Any:
    if x.instance_class is Floats:
        return _by_floats
    narrow = matrix.types[0].dtype == types.uint8
    return _by_narrow_dots if narrow else _by_wide_dots


@compiled
def _clear(total: Any, count: Any) -> None:
    for m in range(count):
        for j in range(ROWS):
            total[m, j] = 0


def _by_floats(matrix: Any, layer: Any, b: Any, x: Any, first: Any, last: Any, scratch: Any) -> None:
    size, width = matrix.weights.shape[2], matrix.weights.shape[3]
    groups = size // GROUP
    place = layer * matrix.weights.shape[1] + b
    w, s = place * size * width, place * matrix.scale.shape[2] * ROWS
    total, tile, values = scratch.total, scratch.tile, x.values
    if last - first == 1:
        row_product(matrix.weights, w, matrix.scale, s, matrix.minimum, s, values, first * size, x.sums, first * groups,
                    total, 0, groups)  # fmt: skip
        return
    _clear(total, last - first)
    scaled = matrix.scale.shape[2] > 0
    for g in range(groups):
        unpack(matrix.weights, w, matrix.scale, s, matrix.minimum, s, tile, 0)
        w += GROUP * width
        if scaled:
            s += ROWS
        k = g * GROUP
        m = first
        while m + 4 <= last:
            add_tile_4(tile, 0, values, m * size + k, size, total, (m - first) * ROWS)
            m += 4
        if m + 2 <= last:
            add_tile_2(tile, 0, values, m * size + k, size, total, (m - first) * ROWS)
            m += 2
        if m < last:
            add_tile_1(tile, 0, values, m * size + k, size, total, (m - first) * ROWS)


def _by_narrow_dots(matrix: Any, layer: Any, b: Any, x: Any, first: Any, last: Any, scratch: Any) -> None:
    groups = matrix.scale.shape[2]
    place = (layer * matrix.weights.shape[1] + b) * groups
    _clear(scratch.total, last - first)
    for g in range(groups):
        w, s = (place + g) * (GROUP * ROWS // 2), (place + g) * ROWS
        read_factors(matrix.weights, matrix.scale, s, matrix.minimum, s, scratch.factors, 0)
        if last - first < 4:
            _add_few(matrix.weights, w, x, g, first, last, scratch)
        else:
            unpack_bytes(matrix.weights, w, scratch.small, 0)
            _add_group(scratch.small, 0, x, g, first, last, scratch)


def _by_wide_dots(matrix: Any, layer: Any, b: Any, x: Any, first: Any, last: Any, scratch: Any) -> None:
    groups = matrix.scale.shape[2]
    place = (layer * matrix.weights.shape[1] + b) * groups
    _clear(scratch.total, last - first)
    for g in range(groups):
        s = (place + g) * ROWS
        read_factors(matrix.weights, matrix.scale, s, matrix.minimum, s, scratch.factors, 0)
        _add_group(matrix.weights, (place + g) * (GROUP * ROWS), x, g, first, last, scratch)


def _add_group(weights: Any, w: Any, x: Any, g: Any, first: Any, last: Any, scratch: Any) -> None:
    """scratch.total += group g of rows first..last times bytes (QUADS, ROWS, 4)."""


def _add_few(weights: Any, w: Any, x: Any, g: Any, first: Any, last: Any, scratch: Any) -> None:
    """The same for what is left after fours of rows; 4-bit weights may still be packed. Then the low digits of wide groups,
    of all rows: a row's sums are added in one order, whatever rows are beside it."""


@overload(_add_group, jit_options=OPTIONS)  # type: ignore[untyped-decorator]
def _choose_group(weights: Any, w: Any, x: Any, g: Any, first: Any, last: Any, scratch: Any) -> Any:
    return _both_of_group if _all_wide(x) else _high_of_group


@overload(_add_few, jit_options=OPTIONS)  # type: ignore[untyped-decorator]
def _choose_few(weights: Any, w: Any, x: Any, g: Any, first: Any, last: Any, scratch: Any) -> Any:
    return _both_of_few if _all_wide(x) else _high_of_few


def _all_wide(x: Any) -> bool:
    """Of the type `Digits`: whether every group has two digits."""
    return bool(x.types[x.fields.index("wide")].dtype == types.boolean)


def _both_of_group(weights: Any, w: Any, x: Any, g: Any, first: Any, last: Any, scratch: Any) -> None:
    size, groups = x.high.shape[1], x.scale.shape[1]
    m = first
    while m + 4 <= last:
        at, place, to = m * size + g * GROUP, m * groups + g, (m - first) * ROWS
        add_dots_4(weights, w, x.high, at, x.low, at, size, x.scale, place, x.sums, place, groups, scratch.factors, 0,
                   scratch.total, to)  # fmt: skip
        m += 4
    _add_few(weights, w, x, g, first, last, scratch)


def _high_of_group(weights: Any, w: Any, x: Any, g: Any, first: Any, last: Any, scratch: Any) -> None:
    size, groups = x.high.shape[1], x.scale.shape[1]
    m = first
    while m + 4 <= last:
        at, place, to = m * size + g * GROUP, m * groups + g, (m - first) * ROWS
        add_high_4(weights, w, x.high, at, x.low, at, size, x.scale, place, x.sums, place, groups, scratch.factors, 0,
                   scratch.total, to)  # fmt: skip
        m += 4
    _add_few(weights, w, x, g, first, last, scratch)


def _both_of_few(weights: Any, w: Any, x: Any, g: Any, first: Any, last: Any, scratch: Any) -> None:
    size, groups = x.high.shape[1], x.scale.shape[1]
    m = last - (last - first) % 4
    if m + 2 <= last:
        at, place, to = m * size + g * GROUP, m * groups + g, (m - first) * ROWS
        add_dots_2(weights, w, x.high, at, x.low, at, size, x.scale, place, x.sums, place, groups, scratch.factors, 0,
                   scratch.total, to)  # fmt: skip
        m += 2
    if m < last:
        at, place, to = m * size + g * GROUP, m * groups + g, (m - first) * ROWS
        add_dots_1(weights, w, x.high, at, x.low, at, size, x.scale, place, x.sums, place, groups, scratch.factors, 0,
                   scratch.total, to)  # fmt: skip


def _high_of_few(weights: Any, w: Any, x: Any, g: Any, first: Any, last: Any, scratch: Any) -> None:
    size, groups = x.high.shape[1], x.scale.shape[1]
    m = last - (last - first) % 4
    if m + 2 <= last:
        at, place, to = m * size + g * GROUP, m * groups + g, (m - first) * ROWS
        add_high_2(weights, w, x.high, at, x.low, at, size, x.scale, place, x.sums, place, groups, scratch.factors, 0,
                   scratch.total, to)  # fmt: skip
        m += 2
    if m < last:
        at, place, to = m * size + g * GROUP, m * groups + g, (m - first) * ROWS
        add_high_1(weights, w, x.high, at, x.low, at, size, x.scale, place, x.sums, place, groups, scratch.factors, 0,
                   scratch.total, to)  # fmt: skip
    flags, m = g * x.wide.shape[1], first
    while m < last:
        if m + 4 <= last and not any_of_four(x.wide, flags + m):
            m += 4
            continue
        if x.wide[g, m]:
            at, place, to = m * size + g * GROUP, m * groups + g, (m - first) * ROWS
            add_low_1(weights, w, x.high, at, x.low, at, size, x.scale, place, x.sums, place, groups, scratch.factors, 0,
                      scratch.total, to)  # fmt: skip
        m += 1


@compiled
def rows_at_once(count: Any, blocks: Any, size: Any) -> Any:
    """How many of `count` rows a thread takes together with one block, so that `size` threads have equal shares."""
    if blocks % size == 0 or count < 8:
        return min(count, CHUNK)
    return min(CHUNK, (-(-count // size) + 3) // 4 * 4)
