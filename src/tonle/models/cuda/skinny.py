# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
"""A matrix times 2 to 16 rows on tensor cores, where reading the weight once is most of the time.

Does: out = x @ W.T (+ bias), added to what `out` holds, or gated (activation(gate) * up), each in one kernel. Rows of W are the
long side of the tensor cores' instruction and tokens the short one, so few tokens waste little. Long rows of few outputs are
split among programs; the last to arrive joins the parts in a fixed order, so results do not depend on who was first.
Does not: norm its input, or decide alone: `skinny_tiling` says None where cuBLAS is as fast, as it is for layers of 32 rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl

from tonle.models.cuda.activation import activated, gate_of
from tonle.models.cuda.gpu_features import roomy
from tonle.models.cuda.launch import follow, launch
from tonle.models.spec import Activation

MAX_ROWS = 16
_PROGRAMS = 132  # as many as an H100 or H200 has multiprocessors


@dataclass(frozen=True, slots=True)
class SkinnyTiling:
    """How one product is cut into programs, and how many blocks of it are under way at a time."""

    block_n: int  # outputs; gated products read twice as many rows of W
    block_k: int  # inputs per turn of the loop
    stages: int  # turns under way at a time
    split: int = 1  # programs that share the inputs of one tile
    warps: int = 4


def skinny_tiling(rows: int, outputs: int, inputs: int, *, glu: bool, gate_up: bool = False) -> SkinnyTiling | None:
    """Found by trying some 280 on two models on an H200, alone and then in whole steps. None: cuBLAS is faster.

    `gate_up`: the weight of a gated product, whose activation follows in another kernel: it is read as the gated one reads it.
    """
    if not 2 <= rows <= MAX_ROWS or outputs * inputs >= 2**31 or not roomy():
        return None
    if glu:
        return SkinnyTiling(32, 128, stages=4)
    if gate_up:
        return SkinnyTiling(64, 128, stages=4)
    if inputs > 4096:
        split = _PROGRAMS // triton.cdiv(outputs, 64)
        return SkinnyTiling(64, 128, stages=6, split=max(1, min(split, triton.cdiv(inputs, 128))))
    return SkinnyTiling(16, 128, stages=12) if outputs * inputs <= 4 * 2**20 else None


class Tiling(Protocol):
    """What `SplitScratch` needs to know of one."""

    @property
    def block_n(self) -> int: ...
    @property
    def split(self) -> int: ...


class SplitScratch:
    """Where programs that share a tile leave their parts. One serves all layers and all products, one after another."""

    def __init__(self, shapes: Iterable[tuple[int, Tiling | None]], device: torch.device) -> None:
        """Enough for all these (outputs, tiling)."""
        tiles = [
            (triton.cdiv(outputs, tiling.block_n), tiling)
            for outputs, tiling in shapes
            if tiling is not None and tiling.split > 1
        ]
        parts = max((count * tiling.split * tiling.block_n * MAX_ROWS for count, tiling in tiles), default=1)
        self.parts = torch.zeros(parts, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(
            max((count for count, _ in tiles), default=1), dtype=torch.int32, device=device
        )  # 0 between kernels


@triton.jit
def _weight_rows(tile, N: tl.constexpr, BN: tl.constexpr, GLU: tl.constexpr):
    """Rows of W that a tile reads: BN of them, or 8 of gate and 8 of up in turns, 2 BN in all.

    The instruction leaves rows r and r + 8 of its result to the same thread, so gate and up meet in registers. Rows past
    the end are the last one again: their results are not stored.
    """
    if GLU:
        r = tl.arange(0, 2 * BN)
        return tl.minimum(tile * BN + r // 16 * 8 + r % 8, N - 1) + r // 8 % 2 * N
    else:
        return tl.minimum(tile * BN + tl.arange(0, BN), N - 1)


@triton.jit
def _dot(w, x, acc, IEEE: tl.constexpr):
    """acc (rows of W, BM) + w (rows of W, BK) @ x (BM, BK).T"""
    if IEEE:
        return tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    else:
        return tl.dot(w, tl.trans(x), acc)


@triton.jit
def _places(PARTS, tile, M, R: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr):
    """Where the first part (R, BM) of a tile lies, and which of its numbers belong to rows that exist."""
    r = tl.arange(0, R)
    m = tl.arange(0, BM)
    place = PARTS + tile.to(tl.int64) * (SPLIT * R * BM) + r[:, None] * BM + m[None, :]
    return place, (m < M)[None, :] & (r >= 0)[:, None]


@triton.jit
def _leave(acc, PARTS, ARRIVED, tile, part, M, R: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr):
    """Leave this program's part. Whether it was the last of its tile."""
    place, some = _places(PARTS, tile, M, R, BM, SPLIT)
    tl.store(place + part * (R * BM), acc, mask=some)
    tl.debug_barrier()
    return tl.atomic_add(ARRIVED + tile, 1, sem="acq_rel") == SPLIT - 1


@triton.jit
def _joined(PARTS, ARRIVED, tile, M, R: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr):
    """The sum of all parts, in order; for the last program, which also leaves the tile's counter at 0."""
    tl.debug_barrier()
    place, some = _places(PARTS, tile, M, R, BM, SPLIT)
    acc = tl.load(place, mask=some, other=0.0, cache_modifier=".cg")
    for other in tl.static_range(1, SPLIT):  # unrolled: their reads are under way together
        acc += tl.load(place + other * (R * BM), mask=some, other=0.0, cache_modifier=".cg")
    tl.store(ARRIVED + tile, 0)
    return acc


@triton.jit
def _apart(acc, BN: tl.constexpr, BM: tl.constexpr):
    """Sums of `_weight_rows` (2 BN, BM) -> gate and up (BN, BM) each."""
    pairs = tl.permute(tl.reshape(acc, (BN // 8, 2, 8, BM)), (0, 2, 3, 1))
    gate, up = tl.split(pairs)  # (BN / 8, 8, BM) each
    return tl.reshape(gate, (BN, BM)), tl.reshape(up, (BN, BM))


@triton.jit
def _finish(y, before, BIAS, n, out, stored, N: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, HAS_BIAS: tl.constexpr,
            GLU: tl.constexpr):  # fmt: skip
    """Bias, activation and residual on float32 sums of `_weight_rows`. Gated: rounded where torch's operations would."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    up = y
    if GLU:
        y, up = _apart(y, BN, BM)
    if HAS_BIAS:
        y += tl.load(BIAS + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if GLU:
        if HAS_BIAS:
            up += tl.load(BIAS + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        gate = y.to(DTYPE).to(tl.float32)
        y = activated(gate, GLU).to(DTYPE).to(tl.float32) * up.to(DTYPE).to(tl.float32)
    tl.store(out, (y + before).to(DTYPE), mask=stored)


@triton.jit(do_not_specialize=["M"])
def _skinny(X, W, BIAS, OUT, PARTS, ARRIVED, M, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
            BK: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr,
            HAS_BIAS: tl.constexpr, ADD: tl.constexpr, SETTLED: tl.constexpr, GLU: tl.constexpr, IEEE: tl.constexpr,
            PDL: tl.constexpr):  # fmt: skip
    """One tile (BN outputs, BM tokens), or one part of its inputs; blocks come by pointers."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    R: tl.constexpr = BN * 2 if GLU else BN
    TURNS: tl.constexpr = (K + BK * SPLIT - 1) // (BK * SPLIT)
    # Every part takes as many turns, the last perhaps some of zeros: were a loop possibly empty, ptxas would serialize it.
    low = part * (TURNS * BK)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    row = W + _weight_rows(tile, N, BN, GLU)[:, None] * K  # (R, 1)
    own_x = X + m[:, None] * K + k[None, :]  # (BM, BK)
    present = (m < M)[:, None] & (k >= 0)[None, :]
    n = tile * BN + tl.arange(0, BN)
    out = OUT + m[None, :] * N + n[:, None]
    stored = (m < M)[None, :] & (n < N)[:, None]
    before = 0.0
    if ADD and SETTLED:
        before = tl.load(out, mask=stored, other=0.0).to(tl.float32)
    follow(PDL)
    if ADD and not SETTLED:  # here and not after the sums, where everything would wait for it
        before = tl.load(out, mask=stored, other=0.0).to(tl.float32)
    acc = tl.zeros([R, BM], tl.float32)
    for turn in tl.range(0, TURNS, num_stages=STAGES):
        first = low + turn * BK
        if K == SPLIT * TURNS * BK:
            w = tl.load(row + (first + k)[None, :])
            x = tl.load(own_x + first, mask=present, other=0.0)
        else:
            inside = (first + k < K)[None, :]
            w = tl.load(row + (first + k)[None, :], mask=inside, other=0.0)
            x = tl.load(own_x + first, mask=present & inside, other=0.0)
        acc = _dot(w, x, acc, IEEE)
    if SPLIT == 1:
        _finish(acc, before, BIAS, n, out, stored, N, BN, BM, HAS_BIAS, GLU)
    else:
        if _leave(acc, PARTS, ARRIVED, tile, part, M, R, BM, SPLIT):
            total = _joined(PARTS, ARRIVED, tile, M, R, BM, SPLIT)
            _finish(total, before, BIAS, n, out, stored, N, BN, BM, HAS_BIAS, GLU)


def skinny(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tiling: SkinnyTiling,
    *,
    bias: torch.Tensor | None = None,
    add: bool = False,
    settled: bool = False,
    glu: bool = False,
    activation: Activation = "silu",
    scratch: SplitScratch | None = None,
) -> torch.Tensor:
    """x (M, K), weight (N, K), out (M, N), all contiguous; `scratch` for tilings that split.

    `glu`: weight is (2 N, K), gate and up; out = activation(gate) * up. `add`: to what out holds, rounded
    once; `settled`: the kernel ahead does not write that, so it is read before that one has ended.
    """
    (rows, inputs), outputs = x.shape, out.shape[1]
    assert 0 < rows <= MAX_ROWS and weight.numel() < 2**31  # places are 32-bit
    grid = (triton.cdiv(outputs, tiling.block_n), tiling.split)
    parts = arrived = None
    if tiling.split > 1:
        assert scratch is not None and not glu and scratch.arrived.numel() >= grid[0]
        assert scratch.parts.numel() >= grid[0] * tiling.split * tiling.block_n * MAX_ROWS
        parts, arrived = scratch.parts, scratch.arrived
    stages = tiling.stages if x.element_size() == 2 else tiling.stages // 2  # in shared memory
    flags = (bias is not None, add, settled, gate_of(activation, glu=glu), x.dtype == torch.float32)
    launch(
        _skinny, grid,
        x, weight, bias, out, parts, arrived, rows, outputs, inputs, tiling.block_n, MAX_ROWS, tiling.block_k, stages,
        tiling.split, *flags, num_warps=tiling.warps,
    )  # fmt: skip
    return out
