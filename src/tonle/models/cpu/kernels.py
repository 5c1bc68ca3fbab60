"""Compiled loops: products with packed weights, attention over the paged cache, and what lies between.

Weights are stored in blocks of `ROWS` output rows, k-major inside a block, so that one vector instruction works on
neighbouring rows and the weights stream through memory once. A group of `GROUP` consecutive k shares a scale and a minimum:
weight = number * scale + minimum.

    q4    uint8   (blocks, K, ROWS / 2)   row j in the low half of byte j, row j + ROWS / 2 in the high half
    q8    int8    (blocks, K, ROWS)
    bf16  uint16  (blocks, K, ROWS)       the upper half of a float32; no scales
    f32   float32 (blocks, K, ROWS)       no scales

Everything here runs without the GIL and allocates nothing.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import njit, types
from numba.extending import intrinsic, overload

from tonle.models.cpu.target import prepare_numba

prepare_numba()

ROWS = 64  # output rows per block: four AVX-512 registers, eight of AVX2
HALF = ROWS // 2
GROUP = 32  # consecutive k that share a scale: as in the stored formats

f32 = np.float32
_fast: Any = njit(fastmath={"contract", "reassoc", "nsz", "arcp"}, boundscheck=False, nogil=True, cache=True, error_model="numpy")
_inline: Any = njit(fastmath={"contract", "reassoc", "nsz", "arcp"}, boundscheck=False, nogil=True, inline="never",
                    error_model="numpy")  # fmt: skip


# -- one group of weights as float32: (GROUP, ROWS)


def unpack(weights: Any, scale: Any, minimum: Any, tile: Any) -> None:
    """Chosen by the weights' type when compiled."""


@overload(unpack, inline="never", jit_options={"fastmath": True, "boundscheck": False, "error_model": "numpy"})
def _unpack(weights: Any, scale: Any, minimum: Any, tile: Any) -> Any:
    if weights.dtype == types.uint8:

        def q4(weights: Any, scale: Any, minimum: Any, tile: Any) -> None:
            for k in range(GROUP):
                packed, row = weights[k], tile[k]
                for j in range(HALF):
                    row[j] = f32(np.int32(packed[j] & 15)) * scale[j] + minimum[j]
                for j in range(HALF):
                    row[HALF + j] = f32(np.int32(packed[j] >> 4)) * scale[HALF + j] + minimum[HALF + j]

        return q4
    if weights.dtype == types.int8:

        def q8(weights: Any, scale: Any, minimum: Any, tile: Any) -> None:
            for k in range(GROUP):
                packed, row = weights[k], tile[k]
                for j in range(ROWS):
                    row[j] = f32(np.int32(packed[j])) * scale[j] + minimum[j]

        return q8
    if weights.dtype == types.uint16:

        def bf16(weights: Any, scale: Any, minimum: Any, tile: Any) -> None:
            bits = tile.view(np.uint32)
            for k in range(GROUP):
                packed, row = weights[k], bits[k]
                for j in range(ROWS):
                    row[j] = np.uint32(packed[j]) << np.uint32(16)

        return bf16

    def plain(weights: Any, scale: Any, minimum: Any, tile: Any) -> None:
        for k in range(GROUP):
            packed, row = weights[k], tile[k]
            for j in range(ROWS):
                row[j] = packed[j]

    return plain
