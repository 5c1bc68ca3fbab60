"""From stored matrices to the layouts of `products.py`, aligned to cache lines.

Does: put rows into blocks, whatever the matrix is for. Does not: know what a model is made of (`pack.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tonle.models.cpu.dots import SIGN
from tonle.models.cpu.memory import aligned
from tonle.models.cpu.products import PackedMatrix
from tonle.models.cpu.stored import Stored, join
from tonle.models.cpu.vector import GROUP, HALF, ROWS

Array = npt.NDArray[Any]


def layout(layers: Sequence[Stored], *, gated: bool, dots: bool) -> PackedMatrix:
    """Matrices of one shape, all in the form of the widest of them; missing rows are zero. dots: integers are laid out for
    integer products.

    They are taken one by one, and once more from the first on where one is wider than those before it: a sequence that reads
    them from a file has only one in memory at a time.
    """
    first = layers[0]
    form, index = _first_row(first), 0
    packing = _Packing(len(layers), first.shape, form, gated=gated, dots=dots)
    while index < len(layers):
        stored = layers[index]
        wider = join([form, _first_row(stored)])
        if wider.numbers.dtype != form.numbers.dtype:
            form, index = _first_row(wider), 0
            packing = _Packing(len(layers), first.shape, form, gated=gated, dots=dots)
            continue
        packing.set(index, stored)
        index += 1
    return packing.finish()


def _first_row(stored: Stored) -> Stored:
    return stored.take(np.arange(1))


class _Packing:
    """`count` matrices on their way into blocks, in the form (dtype, with scales or without) of `form`."""

    def __init__(self, count: int, shape: tuple[int, int], form: Stored, *, gated: bool, dots: bool) -> None:
        rows, columns = shape
        scaled = form.scale is not None
        self._dtype, self._dots = form.numbers.dtype, dots and scaled
        self._order = row_order(rows, gated=gated)  # (blocks * ROWS,) source row, or `rows` for none
        blocks, width = len(self._order) // ROWS, HALF if self._dtype == np.uint8 else ROWS
        inner = (columns // 4, width, 4) if self._dots else (columns, width)
        self._weights = aligned((count, blocks, *inner), self._dtype)
        groups = (count, blocks, columns // GROUP if scaled else 0, ROWS)
        self._scale, self._minimum = aligned(groups, np.dtype(np.float32)), aligned(groups, np.dtype(np.float32))

    def set(self, index: int, stored: Stored) -> None:
        stored, weights = stored.widen(self._dtype), self._weights[index]
        blocks = (_fours if self._dots else _blocks)(stored.numbers, self._order)  # (blocks, K, ROWS), or in fours
        if self._dtype == np.uint8:
            np.bitwise_or(blocks[:, :, :HALF], blocks[:, :, HALF:] << 4, out=weights)
        elif self._dots:
            np.bitwise_xor(blocks.view(np.uint8), SIGN, out=weights.view(np.uint8))  # adds SIGN
        else:
            weights[...] = blocks
        if stored.scale is not None and stored.minimum is not None:
            self._scale[index] = _blocks(stored.scale, self._order)
            self._minimum[index] = _blocks(stored.minimum, self._order)

    def finish(self) -> PackedMatrix:
        minimum = self._minimum if self._minimum.any() else None
        return PackedMatrix(
            self._weights,
            _short(self._scale),
            np.zeros((1, 1, 1, 1), dtype=np.bool_) if minimum is None else _short(minimum),
        )


def _short(factors: Array) -> Array:
    """Scales or minimums: as float16 bits where nothing is lost by it, which spares memory traffic."""
    short = factors.astype(np.float16)
    if not np.array_equal(short.astype(np.float32), factors):
        return factors
    bits = aligned(factors.shape, np.dtype(np.uint16))
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
