# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,assignment"
"""Few-bit weights to 16 bits in device memory, for products of so many rows that writing and reading them again is cheap."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tonle.models.cuda.few_bits import FP8_FACTOR, offset, values
from tonle.models.cuda.launch import follow, launch
from tonle.models.cuda.quantized_gemv import layout_of
from tonle.models.packed import Packed

_ROWS, _BLOCKS = 8, 8  # of a program
_FACTOR = tl.constexpr(FP8_FACTOR)


@triton.jit
def _unpack(W, SCALE, SHIFT, TABLE, OUT, N, K: tl.constexpr, LAYOUT: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr,
            PDL: tl.constexpr):  # fmt: skip
    IN_BLOCK: tl.constexpr = 32 * LAYOUT.places
    DTYPE: tl.constexpr = OUT.dtype.element_ty
    STEP: tl.constexpr = LAYOUT.at_once
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    j = tl.arange(0, 32)
    row = n.to(tl.int64)[:, None, None]
    some = (n < N)[:, None, None] & (b < LAYOUT.blocks)[None, :, None]
    w = tl.load(W + row * (LAYOUT.blocks * 32) + (b[:, None] * 32 + j[None, :])[None, :, :], mask=some, other=0)
    follow(PDL)  # the kernel ahead may read what is written here
    PLACES: tl.constexpr = LAYOUT.places
    for p in tl.static_range(PLACES):
        if p % STEP == 0:
            numbers = values(w, p, TABLE, LAYOUT.form, False, DTYPE)
        k = (b * IN_BLOCK + p * 32)[:, None] + j[None, :]
        if LAYOUT.group > 0:
            group = (b * IN_BLOCK + p * 32)[None, :, None] // LAYOUT.group
        else:
            group = (b * 0)[None, :, None]
        scale = tl.load(SCALE + row * LAYOUT.groups + group, mask=some, other=0.0).to(tl.float32)
        if LAYOUT.form == 2:
            scale *= _FACTOR
        y = numbers[p % STEP] - offset(p, LAYOUT.form)
        if LAYOUT.minimum:
            y += tl.load(SHIFT + row * LAYOUT.groups + group, mask=some, other=0.0).to(tl.float32)
        y *= scale
        tl.store(OUT + row * K + k[None, :, :], y.to(DTYPE), mask=some & (k < K)[None, :, :])


def unpack(packed: Packed, out: torch.Tensor, rows: slice, table: torch.Tensor | None = None) -> torch.Tensor:
    """The weights of some outputs, at the beginning of `out` (flat): (rows, K)."""
    inputs = packed.shape[1]
    numbers, scale = packed.numbers[rows], packed.scale[rows]
    shift = None if packed.minimum is None else packed.minimum[rows]
    outputs = numbers.shape[0]
    grid = (triton.cdiv(outputs, _ROWS), triton.cdiv(packed.num_blocks, _BLOCKS))
    launch(
        _unpack,
        grid,
        numbers,
        scale,
        shift,
        table,
        out,
        outputs,
        inputs,
        layout_of(packed),
        _ROWS,
        _BLOCKS,
        num_warps=4,
    )
    return out[: outputs * inputs].view(outputs, inputs)
