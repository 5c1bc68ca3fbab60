"""Products with packed weights. A matrix's layout decides in which form it takes its input.

Weights are stored in blocks of `ROWS` output rows, so that one vector instruction works on neighbouring rows and weights
stream through memory once. A group of `GROUP` consecutive k shares a scale and a minimum: weight = number * scale + minimum.

k-major, multiplied as float32 (input: `Floats`):
    q4    uint8   (blocks, K, ROWS / 2)       row j in the low half of byte j, row j + ROWS / 2 in the high half
    q8    int8    (blocks, K, ROWS)
    bf16  uint16  (blocks, K, ROWS)           the upper half of a float32; scales unused
    f32   float32 (blocks, K, ROWS)           scales unused
in fours of k, multiplied as integers (input: `Digits` or `Bytes`), where the processor has an instruction for it:
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
    add_bytes_1,
    add_bytes_2,
    add_bytes_4,
    add_digits_1,
    add_digits_2,
    add_digits_4,
    add_outlier,
    lowest_bit,
    read_factors,
    round_group,
    rows_with_outliers,
    split_group,
    unpack_bytes,
)
from tonle.models.cpu.vector import (  # noqa: E402
    CHUNK,
    GROUP,
    ROWS,
    add_tile_1,
    add_tile_2,
    add_tile_4,
    fetch_group,
    row_product,
    unpack,
)

f32 = np.float32
# _nrt: no reference counts. Nothing is allocated, and counting costs more than a small group of weights.
OPTIONS: Any = {"fastmath": {"contract", "reassoc", "nsz", "arcp"}, "boundscheck": False, "nogil": True,
                "error_model": "numpy", "_nrt": False}  # fmt: skip
# For what is called once per group: a call passes every array in a dozen words, which takes longer than the work.
INNER: Any = OPTIONS | {"forceinline": True}
compiled: Any = njit(**OPTIONS)
# Not compiled apart, which takes seconds for a function that has much below it. Cannot have branches that depend on types.
inlined: Any = njit(**OPTIONS, inline="always")


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
    """Rows of x for weights in fours, 16 bits a number: x = scale * (high + low / 256)."""

    high: Any  # (T, K) int8
    low: Any  # (T, K) int8
    scale: Any  # (T, groups)
    sums: Any  # (T, groups): of x over each group


class Bytes(NamedTuple):
    """The same in 8 bits: x = scale * byte, but for one number of a group if that stands out, see `dots.py`."""

    numbers: Any  # (T, K) int8; 0 for a number that stands out
    scale: Any  # (T, groups)
    sums: Any  # (T, groups): of x over each group
    outlier: Any  # (T, groups) float32: the number that stands out
    which: Any  # (groups, T) uint8: 0, or its place in the group + 1


class Scratch(NamedTuple):
    """One thread's working memory."""

    total: Any  # (CHUNK, ROWS) sums of a block
    tile: Any  # (GROUP, ROWS) a group of weights as float32
    small: Any  # (GROUP * ROWS,) uint8: the same as bytes
    factors: Any  # (2, ROWS)
    row: Any  # (widest,) one row of x before it takes its form


def set_group(x: Any, m: Any, g: Any, values: Any, at: Any) -> None:
    """Group g of row m of x (`Floats`, `Digits` or `Bytes`) = GROUP numbers of `values`, taken as flat memory, from `at` on."""


@overload(set_group, jit_options=INNER)  # type: ignore[untyped-decorator]
def _set_group(x: Any, m: Any, g: Any, values: Any, at: Any) -> Any:
    if x.instance_class is Digits:

        def split(x: Any, m: Any, g: Any, values: Any, at: Any) -> None:
            to, place = m * x.high.shape[1] + g * GROUP, m * x.scale.shape[1] + g
            split_group(values, at, x.high, to, x.low, to, x.scale, place, x.sums, place)

        return split

    if x.instance_class is Bytes:

        def round_all(x: Any, m: Any, g: Any, values: Any, at: Any) -> None:
            to, place = m * x.numbers.shape[1] + g * GROUP, m * x.scale.shape[1] + g
            round_group(values, at, x.numbers, to, x.scale, place, x.sums, place, x.outlier, place, x.which,
                        g * x.which.shape[1] + m)  # fmt: skip

        return round_all

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
        fetch_group(matrix.weights, w, matrix.scale, s, matrix.minimum, s)
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
        fetch_group(matrix.weights, w, matrix.scale, s, matrix.minimum, s)
        read_factors(matrix.weights, matrix.scale, s, matrix.minimum, s, scratch.factors, 0)
        if last - first < 8:
            _add_group(matrix.weights, w, x, g, first, last, scratch)
        else:
            unpack_bytes(matrix.weights, w, scratch.small, 0)
            _add_group(scratch.small, 0, x, g, first, last, scratch)


def _by_wide_dots(matrix: Any, layer: Any, b: Any, x: Any, first: Any, last: Any, scratch: Any) -> None:
    groups = matrix.scale.shape[2]
    place = (layer * matrix.weights.shape[1] + b) * groups
    _clear(scratch.total, last - first)
    for g in range(groups):
        w, s = (place + g) * (GROUP * ROWS), (place + g) * ROWS
        fetch_group(matrix.weights, w, matrix.scale, s, matrix.minimum, s)
        read_factors(matrix.weights, matrix.scale, s, matrix.minimum, s, scratch.factors, 0)
        _add_group(matrix.weights, w, x, g, first, last, scratch)


def _add_group(weights: Any, w: Any, x: Any, g: Any, first: Any, last: Any, scratch: Any) -> None:
    """scratch.total += group g of rows first..last times bytes (QUADS, ROWS, 4)."""


def _add_few(weights: Any, w: Any, x: Any, g: Any, first: Any, last: Any, scratch: Any) -> None:
    """The same for what is left after fours of rows; 4-bit weights may still be packed. Then what stands out in any row: a row's
    sums are added in one order, whatever rows are beside it."""


@overload(_add_group, jit_options=INNER)  # type: ignore[untyped-decorator]
def _choose_group(weights: Any, w: Any, x: Any, g: Any, first: Any, last: Any, scratch: Any) -> Any:
    return _digits_of_group if x.instance_class is Digits else _bytes_of_group


@overload(_add_few, jit_options=INNER)  # type: ignore[untyped-decorator]
def _choose_few(weights: Any, w: Any, x: Any, g: Any, first: Any, last: Any, scratch: Any) -> Any:
    return _digits_of_few if x.instance_class is Digits else _bytes_of_few


def _digits_of_group(weights: Any, w: Any, x: Any, g: Any, first: Any, last: Any, scratch: Any) -> None:
    size, groups = x.high.shape[1], x.scale.shape[1]
    m = first
    while m + 4 <= last:
        at, place, to = m * size + g * GROUP, m * groups + g, (m - first) * ROWS
        add_digits_4(weights, w, x.high, at, x.low, at, size, x.scale, place, x.sums, place, groups, scratch.factors, 0,
                     scratch.total, to)  # fmt: skip
        m += 4
    _add_few(weights, w, x, g, first, last, scratch)


def _bytes_of_group(weights: Any, w: Any, x: Any, g: Any, first: Any, last: Any, scratch: Any) -> None:
    size, groups = x.numbers.shape[1], x.scale.shape[1]
    m = first
    while m + 4 <= last:
        at, place, to = m * size + g * GROUP, m * groups + g, (m - first) * ROWS
        add_bytes_4(weights, w, x.numbers, at, size, x.scale, place, x.sums, place, groups, scratch.factors, 0,
                    scratch.total, to)  # fmt: skip
        m += 4
    _add_few(weights, w, x, g, first, last, scratch)


def _digits_of_few(weights: Any, w: Any, x: Any, g: Any, first: Any, last: Any, scratch: Any) -> None:
    size, groups = x.high.shape[1], x.scale.shape[1]
    m = last - (last - first) % 4
    if m + 2 <= last:
        at, place, to = m * size + g * GROUP, m * groups + g, (m - first) * ROWS
        add_digits_2(weights, w, x.high, at, x.low, at, size, x.scale, place, x.sums, place, groups, scratch.factors, 0,
                     scratch.total, to)  # fmt: skip
        m += 2
    if m < last:
        at, place, to = m * size + g * GROUP, m * groups + g, (m - first) * ROWS
        add_digits_1(weights, w, x.high, at, x.low, at, size, x.scale, place, x.sums, place, groups, scratch.factors, 0,
                     scratch.total, to)  # fmt: skip


def _bytes_of_few(weights: Any, w: Any, x: Any, g: Any, first: Any, last: Any, scratch: Any) -> None:
    size, groups = x.numbers.shape[1], x.scale.shape[1]
    m = last - (last - first) % 4
    if m + 2 <= last:
        at, place, to = m * size + g * GROUP, m * groups + g, (m - first) * ROWS
        add_bytes_2(weights, w, x.numbers, at, size, x.scale, place, x.sums, place, groups, scratch.factors, 0,
                    scratch.total, to)  # fmt: skip
        m += 2
    if m < last:
        at, place, to = m * size + g * GROUP, m * groups + g, (m - first) * ROWS
        add_bytes_1(weights, w, x.numbers, at, size, x.scale, place, x.sums, place, groups, scratch.factors, 0,
                    scratch.total, to)  # fmt: skip
    left: Any = rows_with_outliers(x.which, g * x.which.shape[1] + first, last - first)
    while left:
        m = lowest_bit(left)
        place = np.int64(x.which[g, first + m]) - 1
        add_outlier(weights, w, place, x.outlier[first + m, g], scratch.factors, 0, scratch.total, m * ROWS)
        left &= left - np.uint64(1)


@compiled
def rows_at_once(count: Any, blocks: Any, size: Any) -> Any:
    """How many of `count` rows a thread takes together with one block, so that `size` threads have equal shares."""
    if blocks % size == 0 or count < 8:
        return min(count, CHUNK)
    return min(CHUNK, (-(-count // size) + 3) // 4 * 4)
