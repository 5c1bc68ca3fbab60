# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
"""A matrix times 2 to 256 rows on tensor cores, where reading the weight once should still be most of the time.

Does: out = x @ W.T (+ bias), added to what `out` holds, or gated (silu(gate) * up), each in one kernel. Rows of W are the
long side of the tensor cores' instruction and tokens the short one, so few tokens waste little. Long rows of few outputs may
be split among programs; the last to arrive joins the parts in a fixed order, so results do not depend on who was first.
Does not: norm its input, or decide alone: `cut_for` says None where cuBLAS is expected to be faster.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tonle.models.cuda.dependent import follow, launch_options
from tonle.models.cuda.skinny_cuts import Cut, cut_for


class SplitScratch:
    """Where programs that share a tile leave their parts. One serves all layers and all products, one after another."""

    def __init__(self, num_parts: int, num_tiles: int, device: torch.device) -> None:
        self.parts = torch.zeros(max(1, num_parts), dtype=torch.float32, device=device)
        self.arrived = torch.zeros(max(1, num_tiles), dtype=torch.int32, device=device)  # 0 between kernels

    @classmethod
    def enough_for(cls, shapes: Iterable[tuple[int, int, bool]], max_rows: int, device: torch.device) -> SplitScratch:
        """For all that `cut_for` says of these (outputs, inputs, glu) with up to `max_rows` rows."""
        num_parts = num_tiles = 0
        for outputs, inputs, glu in shapes:
            for rows in range(1, max_rows + 1):
                cut = cut_for(rows, outputs, inputs, glu=glu)
                if cut is not None and cut.split > 1:
                    num_parts = max(num_parts, cut.num_parts(rows, outputs, glu=glu))
                    num_tiles = max(num_tiles, cut.num_tiles(rows, outputs))
        return cls(num_parts, num_tiles, device)


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
def _ask(pointers):
    """One line of memory per pointer, into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _dot(w, x, acc, IEEE: tl.constexpr):
    """acc (rows of W, BM) + w (rows of W, BK) @ x (BM, BK).T"""
    if IEEE:
        return tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    else:
        return tl.dot(w, tl.trans(x), acc)


@triton.jit
def _places(PARTS, tile, m_left, R: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr):
    """Where the first part (R, BM) of a tile lies, and which of its numbers belong to rows that exist."""
    r = tl.arange(0, R)
    m = tl.arange(0, BM)
    place = PARTS + tile.to(tl.int64) * (SPLIT * R * BM) + r[:, None] * BM + m[None, :]
    return place, (m < m_left)[None, :] & (r >= 0)[:, None]


@triton.jit
def _leave(acc, PARTS, ARRIVED, tile, part, m_left, R: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr):
    """Leave this program's part. Whether it was the last of its tile."""
    place, some = _places(PARTS, tile, m_left, R, BM, SPLIT)
    tl.store(place + part * (R * BM), acc, mask=some)
    tl.debug_barrier()
    return tl.atomic_add(ARRIVED + tile, 1, sem="acq_rel") == SPLIT - 1


@triton.jit
def _joined(PARTS, ARRIVED, tile, m_left, R: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr):
    """The sum of all parts, in order; for the last program, which also leaves the tile's counter at 0."""
    tl.debug_barrier()
    place, some = _places(PARTS, tile, m_left, R, BM, SPLIT)
    acc = tl.load(place, mask=some, other=0.0, cache_modifier=".cg")
    if R * BM <= 2048:  # few numbers per thread: all parts are read at once
        for other in tl.static_range(1, SPLIT):
            acc += tl.load(place + other * (R * BM), mask=some, other=0.0, cache_modifier=".cg")
    else:
        for other in tl.range(1, SPLIT, num_stages=1):
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
def _finish(y, up, BIAS, OUT, tile, m, M, N: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
            HAS_BIAS: tl.constexpr, ADD: tl.constexpr, GLU: tl.constexpr, MIXED: tl.constexpr):  # fmt: skip
    """Bias, activation and residual on float32 sums. Gated: rounded where separate torch operations would round.

    MIXED: y (2 BN, BM) holds gate and up as `_weight_rows` lays them; else y and `up` are (BN, BM) each.
    """
    n = tile * BN + tl.arange(0, BN)
    DTYPE: tl.constexpr = OUT.dtype.element_ty
    if MIXED:
        y, up = _apart(y, BN, BM)
    if HAS_BIAS:
        y += tl.load(BIAS + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if GLU:
        if HAS_BIAS:
            up += tl.load(BIAS + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        gate = y.to(DTYPE).to(tl.float32)
        y = (gate * tl.sigmoid(gate)).to(DTYPE).to(tl.float32) * up.to(DTYPE).to(tl.float32)
    out = OUT + m[None, :] * N + n[:, None]
    some = (m < M)[None, :] & (n < N)[:, None]
    if ADD:
        y += tl.load(out, mask=some, other=0.0).to(tl.float32)
    tl.store(out, y.to(DTYPE), mask=some)


@triton.jit(do_not_specialize=["M"])
def _skinny(X, W, BIAS, OUT, PARTS, ARRIVED, M, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
            BK: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr, AHEAD: tl.constexpr, LINE: tl.constexpr,
            HAS_BIAS: tl.constexpr, ADD: tl.constexpr, GLU: tl.constexpr, IEEE: tl.constexpr,
            PDL: tl.constexpr):  # fmt: skip
    """One tile (BN outputs, BM tokens), or one part of its inputs; blocks come by pointers."""
    m_tile = tl.program_id(0)  # neighbours read the same weights
    tile = tl.program_id(1)
    part = tl.program_id(2)
    R: tl.constexpr = BN * 2 if GLU else BN
    TURNS: tl.constexpr = (K + BK * SPLIT - 1) // (BK * SPLIT)
    # Every part takes as many turns, the last perhaps some of zeros: were a loop possibly empty, ptxas would serialize it.
    low = part * (TURNS * BK)
    m = m_tile * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    row = W + _weight_rows(tile, N, BN, GLU)[:, None] * K  # (R, 1)
    if AHEAD > 0:
        _ask(row + tl.minimum(low + tl.arange(0, AHEAD // LINE) * LINE, K - 1)[None, :])
    own_x = X + m[:, None] * K + k[None, :]  # (BM, BK)
    present = (m < M)[:, None] & (k >= 0)[None, :]
    follow(PDL)
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
        _finish(acc, acc, BIAS, OUT, tile, m, M, N, BN, BM, HAS_BIAS, ADD, GLU, GLU)
    else:
        which = tile * tl.num_programs(0) + m_tile
        left = M - m_tile * BM
        if _leave(acc, PARTS, ARRIVED, which, part, left, R, BM, SPLIT):
            total = _joined(PARTS, ARRIVED, which, left, R, BM, SPLIT)
            _finish(total, total, BIAS, OUT, tile, m, M, N, BN, BM, HAS_BIAS, ADD, GLU, GLU)


@triton.jit(do_not_specialize=["M"])
def _skinny_tma(X, W, BIAS, OUT, PARTS, ARRIVED, M, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr,
                BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr,
                HAS_BIAS: tl.constexpr, ADD: tl.constexpr, GLU: tl.constexpr, IEEE: tl.constexpr,
                PDL: tl.constexpr):  # fmt: skip
    """The same with X and W as tensor descriptors: what lies outside of them reads as 0. Gated tiles are not split."""
    tl.static_assert(SPLIT == 1 or not GLU)
    m_tile = tl.program_id(0)
    tile = tl.program_id(1)
    part = tl.program_id(2)
    TURNS: tl.constexpr = (K + BK * SPLIT - 1) // (BK * SPLIT)
    follow(PDL)
    acc = tl.zeros([BN, BM], tl.float32)
    up = tl.zeros([BN, BM], tl.float32)
    for turn in tl.range(0, TURNS, num_stages=STAGES):
        first = (part * TURNS + turn) * BK
        x = X.load([m_tile * BM, first])
        acc = _dot(W.load([tile * BN, first]), x, acc, IEEE)
        if GLU:
            up = _dot(W.load([N + tile * BN, first]), x, up, IEEE)
    m = m_tile * BM + tl.arange(0, BM)
    if SPLIT == 1:
        _finish(acc, up, BIAS, OUT, tile, m, M, N, BN, BM, HAS_BIAS, ADD, GLU, False)
    else:
        which = tile * tl.num_programs(0) + m_tile
        left = M - m_tile * BM
        if _leave(acc, PARTS, ARRIVED, which, part, left, BN, BM, SPLIT):
            total = _joined(PARTS, ARRIVED, which, left, BN, BM, SPLIT)
            _finish(total, up, BIAS, OUT, tile, m, M, N, BN, BM, HAS_BIAS, ADD, GLU, False)


def skinny(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    cut: Cut,
    *,
    bias: torch.Tensor | None = None,
    add: bool = False,
    glu: bool = False,
    scratch: SplitScratch | None = None,
) -> torch.Tensor:
    """x (M, K), weight (N, K), out (M, N), all contiguous; `scratch` for cuts that split.

    `glu`: weight is (2 N, K), gate and up; out = silu(gate) * up. `add`: to what out holds, rounded once.
    """
    (rows, inputs), outputs = x.shape, out.shape[1]
    assert weight.numel() < 2**31 and out.numel() < 2**31  # places are 32-bit
    grid = (triton.cdiv(rows, cut.block_m), triton.cdiv(outputs, cut.block_n), cut.split)
    parts = arrived = None
    if cut.split > 1:
        assert scratch is not None and scratch.parts.numel() >= cut.num_parts(rows, outputs, glu=glu)
        assert scratch.arrived.numel() >= cut.num_tiles(rows, outputs)
        parts, arrived = scratch.parts, scratch.arrived
    flags = (bias is not None, add, glu, x.dtype == torch.float32)
    pdl = launch_options()
    if cut.tma:
        _skinny_tma[grid](
            TensorDescriptor.from_tensor(x, [cut.block_m, cut.block_k]),
            TensorDescriptor.from_tensor(weight, [cut.block_n, cut.block_k]), bias, out, parts, arrived, rows, outputs,
            inputs, cut.block_n, cut.block_m, cut.block_k, cut.stages, cut.split, *flags, num_warps=cut.warps, **pdl,
        )  # fmt: skip
    else:
        _skinny[grid](
            x, weight, bias, out, parts, arrived, rows, outputs, inputs, cut.block_n, cut.block_m, cut.block_k,
            cut.stages, cut.split, cut.ahead if pdl["PDL"] else 0, 128 // x.element_size(), *flags,
            num_warps=cut.warps, **pdl,
        )  # fmt: skip
    return out
