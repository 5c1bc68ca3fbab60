# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,assignment"
"""A matrix of few-bit numbers times two rows or more, on tensor cores: numbers are unpacked to 16 bits in registers.

Does: out = x @ W.T (+ bias), added to what `out` holds, or gated, each in one kernel; as `skinny.py` for few rows, with larger
tiles for more. The numbers are exact in 16 bits and sums are scaled, group by group, in float32: nothing is rounded that the
product with unpacked weights would not round. Does not: norm its input; multiply in 8 bits (`fp8_product.py`); win where rows
are so many that unpacking once and cuBLAS is faster (`unpack.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tonle.models.cuda.few_bit_pairs import pairs
from tonle.models.cuda.gpu_features import INTERPRETED
from tonle.models.cuda.launch import follow, launch
from tonle.models.cuda.quantized_gemv import layout_of
from tonle.models.cuda.skinny import MAX_ROWS, SplitScratch, _finish, _joined, _leave, _weight_rows
from tonle.models.packed import Packed

_PROGRAMS = 132  # as many as an H100 or H200 has multiprocessors


@triton.jit
def _dot(w, x, acc, IEEE: tl.constexpr):
    """acc (rows of W, BM) + w (rows of W, 32) @ x (32, BM)"""
    if IEEE:
        return tl.dot(w, x, acc, input_precision="ieee")
    else:
        return tl.dot(w, x, acc)


@dataclass(frozen=True, slots=True)
class DotTiling:
    """How one product is cut into programs, and how many blocks of words are under way at a time."""

    block_n: int  # outputs; gated products read twice as many rows of W
    block_m: int  # rows of x
    stages: int
    split: int = 1  # programs that share the inputs of one tile; of few rows only
    warps: int = 4
    fetch: int = 0  # blocks of words that are asked for before the kernel ahead has ended: they come as far as L2


@triton.jit
def _ask_for(rows, first, FETCH: tl.constexpr, PADDED: tl.constexpr):
    """Let FETCH blocks of words from `first` on, of each of rows (R,), come as far as L2: a block is a line of it."""
    block = tl.arange(0, PADDED)
    lines = rows[:, None] + (first + tl.minimum(block, FETCH - 1))[None, :] * 32
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False,
                              pack=1)  # fmt: skip


@triton.jit
def _scale_of(SCALE, w_rows, block, p: tl.constexpr, LAYOUT: tl.constexpr):
    """Scales (R,) of rows of W at the places from p on of a block, float32. Past the last block there are none."""
    IN_BLOCK: tl.constexpr = 32 * LAYOUT.places
    group = tl.minimum((block * IN_BLOCK + p * 32) // LAYOUT.group, LAYOUT.groups - 1)
    return tl.load(SCALE + w_rows * LAYOUT.groups + group).to(tl.float32)


@triton.jit(do_not_specialize=["M"])
def _quantized_dot(X, GAIN, W, SCALE, SHIFT, TABLE, BIAS, OUT, PARTS, ARRIVED, eps, M, STRIDE: tl.constexpr,
                   N: tl.constexpr, K: tl.constexpr, LAYOUT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
                   STAGES: tl.constexpr, SPLIT: tl.constexpr, FETCH: tl.constexpr, PADDED: tl.constexpr,
                   HAS_BIAS: tl.constexpr, ADD: tl.constexpr, SETTLED: tl.constexpr, GLU: tl.constexpr, NORM: tl.constexpr,
                   IEEE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One tile (BN outputs, BM rows), or with SPLIT one part of its inputs."""
    FORM: tl.constexpr = LAYOUT.form
    PLACES: tl.constexpr = LAYOUT.places
    SPAN: tl.constexpr = LAYOUT.span
    IN_BLOCK: tl.constexpr = 32 * LAYOUT.places
    DTYPE: tl.constexpr = X.dtype.element_ty
    R: tl.constexpr = BN * 2 if GLU else BN
    TURNS: tl.constexpr = (LAYOUT.blocks + SPLIT - 1) // SPLIT
    EVEN: tl.constexpr = LAYOUT.blocks * IN_BLOCK == K and LAYOUT.blocks == TURNS * SPLIT
    tile = tl.program_id(1)
    if SPLIT == 1:
        part = 0
        m = tl.program_id(0) * BM + tl.arange(0, BM)
    else:
        part = tl.program_id(0)
        m = tl.arange(0, BM)
    low = part * TURNS
    j = tl.arange(0, 32)
    w_rows = _weight_rows(tile, N, BN, GLU)
    own = W + w_rows[:, None] * (LAYOUT.blocks * 32) + j[None, :]  # (R, 32)
    own_x = X + m[None, :] * K + j[:, None]  # (32, BM)
    own_gain = GAIN + m[None, :] * 0 + j[:, None] if NORM else None
    present = (m < M)[None, :] & (j >= 0)[:, None]
    n = tile * BN + tl.arange(0, BN)
    out = OUT + m[None, :].to(tl.int64) * STRIDE + n[:, None]
    stored = (m < M)[None, :] & (n < N)[:, None]
    if FETCH > 0:
        _ask_for(W + w_rows * (LAYOUT.blocks * 32), low, FETCH, PADDED)
    before = 0.0
    if ADD and SETTLED:
        before = tl.load(out, mask=stored, other=0.0).to(tl.float32)
    follow(PDL)
    if ADD and not SETTLED:  # here and not after the sums, where everything would wait for it
        before = tl.load(out, mask=stored, other=0.0).to(tl.float32)
    acc = tl.zeros([R, BM], tl.float32)
    squares = tl.zeros([32, BM], tl.float32)
    ones = tl.full([R, 32], 1.0, DTYPE)
    for turn in tl.range(0, TURNS, num_stages=STAGES):
        block = low + turn
        if EVEN:
            w = tl.load(own + block * 32)
        else:
            w = tl.load(
                own + block * 32, mask=(w_rows >= 0)[:, None] & (j < (LAYOUT.blocks - block) * 32)[None, :], other=0
            )
        numbers = pairs(w, TABLE, FORM, DTYPE)
        for begin in tl.static_range(0, PLACES, SPAN):
            if LAYOUT.group > 0:
                some = tl.zeros([R, BM], tl.float32)
                sums = tl.zeros([R, BM], tl.float32)  # of x, for every row of W alike
            for p in tl.static_range(begin, begin + SPAN):
                first = block * IN_BLOCK + p * 32
                inside = present if EVEN else present & (first + j < K)[:, None]
                x = tl.load(own_x + first, mask=inside, other=0.0)
                if NORM:
                    gain = tl.load(own_gain + first, mask=inside, other=0.0).to(tl.float32)
                    exact = x.to(tl.float32)
                    squares += exact * exact
                    x = (exact * gain).to(DTYPE)
                if LAYOUT.group > 0:
                    some = _dot(numbers[p], x, some, IEEE)
                    if LAYOUT.minimum:
                        sums = _dot(ones, x, sums, IEEE)
                else:
                    acc = _dot(numbers[p], x, acc, IEEE)
            if LAYOUT.group > 0:
                if LAYOUT.minimum:
                    some += _scale_of(SHIFT, w_rows, block, begin, LAYOUT)[:, None] * sums
                acc += some * _scale_of(SCALE, w_rows, block, begin, LAYOUT)[:, None]
    if LAYOUT.group == 0:
        acc *= tl.load(SCALE + w_rows).to(tl.float32)[:, None]
    if NORM:
        acc *= tl.rsqrt(tl.sum(squares, 0) / K + eps)[None, :]
    if SPLIT == 1:
        _finish(acc, before, BIAS, n, out, stored, N, BN, BM, HAS_BIAS, GLU)
    else:
        if _leave(acc, PARTS, ARRIVED, tile, part, M, R, BM, SPLIT):
            total = _joined(PARTS, ARRIVED, tile, M, R, BM, SPLIT)
            _finish(total, before, BIAS, n, out, stored, N, BN, BM, HAS_BIAS, GLU)


def dot_tiling(packed: Packed, rows: int, *, glu: bool, norm: bool = False) -> DotTiling:
    outputs = packed.shape[0] // (2 if glu else 1)
    if rows == 1:  # programs of one warp; `norm` is not split
        if glu:
            return DotTiling(8, 8, stages=5, warps=1)
        split = 1 if norm else max(1, min(_PROGRAMS * 4 // triton.cdiv(outputs, 16), packed.num_blocks // 4))
        return DotTiling(16, 8, stages=5, split=split, warps=1)
    if rows <= MAX_ROWS:
        if glu:
            return DotTiling(32, MAX_ROWS, stages=4)
        tiles = triton.cdiv(outputs, 64)
        split = max(1, min(_PROGRAMS // tiles, packed.num_blocks // 4))
        return DotTiling(64, MAX_ROWS, stages=4, split=split)
    if rows <= 64:
        return DotTiling(32 if glu else 64, 64, stages=3)
    return DotTiling(64 if glu else 128, 128, stages=3, warps=8)


def quantized_dot(
    x: torch.Tensor,
    packed: Packed,
    out: torch.Tensor,
    *,
    table: torch.Tensor | None = None,
    gain: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    add: bool = False,
    settled: bool = False,
    glu: int = 0,
    tiling: DotTiling | None = None,
    scratch: SplitScratch | None = None,
) -> torch.Tensor:
    """As `skinny`, for any number of rows: x (M, K) contiguous, out (M, N), whose rows may be apart; packed (N, K), or (2 N, K)
    where `glu` names an activation. `gain`: norm x first. `scratch` for tilings that split, which do not norm."""
    (rows, inputs), outputs = x.shape, out.shape[1]
    tiling = tiling or dot_tiling(packed, rows, glu=bool(glu), norm=gain is not None)
    assert x.numel() < 2**31 and packed.numbers.numel() < 2**31  # places are 32-bit
    tiles = triton.cdiv(outputs, tiling.block_n)
    parts = arrived = None
    if tiling.split > 1:
        assert scratch is not None and not glu and rows <= tiling.block_m and scratch.arrived.numel() >= tiles
        assert scratch.parts.numel() >= tiles * tiling.split * tiling.block_n * tiling.block_m
        parts, arrived = scratch.parts, scratch.arrived
    fetch = 0 if INTERPRETED else min(tiling.fetch, packed.num_blocks // tiling.split)
    padded = triton.next_power_of_2(max(1, fetch))
    grid = (tiling.split if tiling.split > 1 else triton.cdiv(rows, tiling.block_m), tiles)
    launch(
        _quantized_dot, grid,
        x, gain, packed.numbers, packed.scale, packed.minimum, table, bias, out, parts, arrived, eps, rows, out.stride(0),
        outputs, inputs, layout_of(packed), tiling.block_n, tiling.block_m, tiling.stages, tiling.split, fetch, padded,
        bias is not None, add, settled,
        glu, gain is not None, x.dtype == torch.float32, num_warps=tiling.warps,
    )  # fmt: skip
    return out
