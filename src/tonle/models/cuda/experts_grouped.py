# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
"""Products of many rows with the experts they chose: each expert's weights are read once for each tile of its rows.

Does: `grouped_gate_up` (from tokens to pairs of a token and an expert, gated), `grouped_down` (of pairs), and `add_up` (what a
token's experts give, times its shares, and what the shared expert gives, added to its hidden state). Which pairs an expert has
comes from `experts_routing.assign`, on the device: the grid has room for the most tiles there can be, and programs without one
end at once. Rows of W are the long side of the tensor cores' instruction, as in `skinny.py`. Nothing is added atomically: the
order of additions is fixed. Does not: serve a single row (`experts_one_row.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tonle.models.cuda import gpu_features
from tonle.models.cuda.experts_gate import EXPERT_GATES, gated
from tonle.models.cuda.experts_routing import tile_of
from tonle.models.cuda.experts_weights import ExpertWeights
from tonle.models.cuda.launch import follow, launch
from tonle.models.cuda.skinny import _apart, _dot, _weight_rows
from tonle.models.spec import MixerSpec

_OTHER_BYTES = 2048  # of shared memory: what sums and scans take


@dataclass(frozen=True, slots=True)
class GroupedTiling:
    """How one product is cut into programs, and how many blocks of it are under way at a time."""

    block_n: int  # outputs; gate and up read twice as many rows of W
    block_m: int  # pairs
    block_k: int  # inputs per turn of the loop
    stages: int  # turns under way at a time
    warps: int = 4


class Routed(NamedTuple):
    """What `assign` leaves, all on the device."""

    counts: torch.Tensor  # (experts,) int32
    lists: torch.Tensor  # (experts, capacity) int32: pairs of each expert
    shares: torch.Tensor  # (T * top,) float32


# Pairs per expert, on average, from which on wider tiles are used: each step changes kernels.
MANY = (10, 32, 96)


def grouped_tiling(pairs: int, experts: int, *, glu: bool) -> GroupedTiling:
    """By how many pairs an expert has on average: tiles have room for most experts' pairs, so that weights are read once.

    Found by trying ten to twenty for each of eight numbers of rows on an H200. Blocks of W are as high with a gate as without.
    """
    mean, n = pairs / experts, 1 if glu else 2
    if mean < MANY[0]:
        return GroupedTiling(64 * n, 16, 128, stages=3)
    if mean < MANY[1]:
        return GroupedTiling(64 * n, 32, 64, stages=5)
    if mean < MANY[2]:
        return GroupedTiling(64 * n, 64, 64, stages=4)
    return GroupedTiling(128 * n, 128, 64, stages=4, warps=8)


def fitting(tiling: GroupedTiling, *, glu: bool, element_size: int) -> GroupedTiling:
    """With fewer blocks under way, or smaller ones, where the device has less shared memory than an H200."""
    has = gpu_features.shared_bytes()
    turn = (tiling.block_n * (2 if glu else 1) + tiling.block_m) * tiling.block_k * element_size
    stages = tiling.stages if has is None else min(tiling.stages, (has - _OTHER_BYTES) // turn)
    if stages >= 2:
        return replace(tiling, stages=stages)
    return fitting(replace(tiling, block_k=tiling.block_k // 2), glu=glu, element_size=element_size)


def changes(mixer: MixerSpec) -> set[int]:
    """Numbers of rows from which on `grouped_tiling` gives another answer."""
    return {-(-bound * mixer.num_experts // mixer.experts_per_token) for bound in MANY}


def most_tiles(pairs: int, experts: int, block_m: int) -> int:
    """However the pairs are distributed: every tile but one of each expert is full."""
    few = min(pairs, experts)
    return few + (pairs - few) // block_m


@triton.jit
def store_tile(acc, BIAS, OUT, expert, pair, present, block, N: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
               HAS_BIAS: tl.constexpr, GATE: tl.constexpr, CLAMP: tl.constexpr):  # fmt: skip
    """Sums of `_weight_rows`, with bias and activation, to the rows `pair` of OUT that are `present`."""
    ROWS: tl.constexpr = N * 2 if GATE else N
    n = block * BN + tl.arange(0, BN)
    y = acc
    if GATE:
        y, up = _apart(acc, BN, BM)
    if HAS_BIAS:
        y += tl.load(BIAS + expert * ROWS + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if GATE:
        if HAS_BIAS:
            up += tl.load(BIAS + expert * ROWS + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        y = gated(y, up, GATE, CLAMP, OUT.dtype.element_ty)
    out = OUT + pair[None, :] * N + n[:, None]
    tl.store(out, y.to(OUT.dtype.element_ty), mask=present[None, :] & (n < N)[:, None])


@triton.jit
def _grouped(X, W, BIAS, OUT, COUNTS, LISTS, N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
             CAPACITY: tl.constexpr, TOP: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
             STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr, CLAMP: tl.constexpr, SETTLED: tl.constexpr,
             IEEE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One tile (BN outputs, BM pairs). Row pair // TOP of X, row pair of OUT. SETTLED: lists are two kernels old."""
    R: tl.constexpr = BN * 2 if GATE else BN
    ROWS: tl.constexpr = N * 2 if GATE else N
    TURNS: tl.constexpr = (K + BK - 1) // BK
    if not SETTLED:
        follow(PDL)
    expert, first, count = tile_of(COUNTS, tl.program_id(0), E, EP, BM)
    if expert < E:
        m = first + tl.arange(0, BM)
        present = m < count
        pair = tl.load(LISTS + expert * CAPACITY + m, mask=present, other=0).to(tl.int64)
        k = tl.arange(0, BK)
        block = tl.program_id(1)
        row = W + expert.to(tl.int64) * (ROWS * K) + _weight_rows(block, N, BN, GATE != 0)[:, None] * K  # (R, 1)
        own_x = X + (pair // TOP)[:, None] * K + k[None, :]  # (BM, BK)
        some = present[:, None] & (k >= 0)[None, :]
        if SETTLED:
            follow(PDL)
        acc = tl.zeros([R, BM], tl.float32)
        for turn in tl.range(0, TURNS, num_stages=STAGES):
            at = turn * BK
            if K == TURNS * BK:
                w = tl.load(row + (at + k)[None, :])
                x = tl.load(own_x + at, mask=some, other=0.0)
            else:
                inside = (at + k < K)[None, :]
                w = tl.load(row + (at + k)[None, :], mask=inside, other=0.0)
                x = tl.load(own_x + at, mask=some & inside, other=0.0)
            acc = _dot(w, x, acc, IEEE)
        store_tile(acc, BIAS, OUT, expert, pair, present, block, N, BN, BM, HAS_BIAS, GATE, CLAMP)
    else:
        if SETTLED:
            follow(PDL)


def _launch(
    x: torch.Tensor, weights: ExpertWeights, out: torch.Tensor, routed: Routed, top: int,
    tiling: GroupedTiling, gate: int, clamp: float, *, settled: bool,
) -> None:  # fmt: skip
    """Row p of `out` is pair p; row p // top of `x` is what it takes."""
    experts, capacity = routed.lists.shape
    pairs, outputs = out.shape
    grid = (most_tiles(pairs, experts, tiling.block_m), triton.cdiv(outputs, tiling.block_n))
    tiling = fitting(tiling, glu=gate != 0, element_size=x.element_size())
    launch(
        _grouped, grid,
        x, weights.weight, weights.bias, out, routed.counts, routed.lists, outputs, x.shape[1], experts,
        triton.next_power_of_2(experts), capacity, top, tiling.block_n, tiling.block_m, tiling.block_k, tiling.stages,
        weights.bias is not None, gate, clamp, settled, x.dtype == torch.float32,
        num_warps=tiling.warps,
    )  # fmt: skip


def grouped_gate_up(
    x: torch.Tensor,
    weights: ExpertWeights,
    routed: Routed,
    mixer: MixerSpec,
    out: torch.Tensor,
    tiling: GroupedTiling | None = None,
) -> None:
    """x (T, hidden), weights (experts, 2 * size, hidden) -> out (T * top, size), gated."""
    tiling = tiling or grouped_tiling(out.shape[0], mixer.num_experts, glu=True)
    _launch(x, weights, out, routed, mixer.experts_per_token, tiling, EXPERT_GATES[mixer.activation], mixer.clamp,
            settled=False)  # fmt: skip


def grouped_down(
    x: torch.Tensor,
    weights: ExpertWeights,
    routed: Routed,
    out: torch.Tensor,
    tiling: GroupedTiling | None = None,
) -> None:
    """x (T * top, size), weights (experts, hidden, size) -> out (T * top, hidden).

    The kernel ahead does not write `routed`.
    """
    tiling = tiling or grouped_tiling(out.shape[0], weights.weight.shape[0], glu=False)
    _launch(x, weights, out, routed, 1, tiling, 0, 0.0, settled=True)


@triton.jit
def _add_up(Y, SHARES, SHARED, LOGITS, LIVE, OUT, N: tl.constexpr, TOP: tl.constexpr, TP: tl.constexpr, E: tl.constexpr,
            WIDTH: tl.constexpr, NORMED: tl.constexpr, HAS_SHARED: tl.constexpr, SHARED_GATE: tl.constexpr,
            ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BLOCK numbers of one token."""
    t = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    r = tl.arange(0, TP)
    inside = n < N
    live = tl.load(LIVE)  # this, shares and logits are older than the kernel ahead
    share = tl.load(SHARES + t * TOP + r, mask=(r < TOP) & (t < live), other=0.0)
    if SHARED_GATE:
        gate = tl.sigmoid(tl.load(LOGITS + t * WIDTH + E).to(tl.float32))
    follow(PDL)
    if t < live:
        if NORMED:
            share /= tl.sum(share, 0)
        some = (r < TOP)[:, None] & inside[None, :]
        y = tl.load(Y + (t * TOP + r).to(tl.int64)[:, None] * N + n[None, :], mask=some, other=0.0).to(tl.float32)
        total = tl.sum(y * share[:, None], 0)
        out = OUT + t.to(tl.int64) * N + n
        if HAS_SHARED:
            shared = tl.load(SHARED + t.to(tl.int64) * N + n, mask=inside, other=0.0).to(tl.float32)
            if SHARED_GATE:
                shared *= gate
            total += shared
        if ADD:
            total += tl.load(out, mask=inside, other=0.0).to(tl.float32)
        tl.store(out, total.to(OUT.dtype.element_ty), mask=inside)


def add_up(
    y: torch.Tensor,
    routed: Routed,
    shared: torch.Tensor | None,
    logits: torch.Tensor,
    live: torch.Tensor,
    mixer: MixerSpec,
    out: torch.Tensor,
    *,
    add: bool,
) -> None:
    """y (T * top, hidden), shared (T, hidden) -> out (T, hidden), added to what it holds if `add`.

    logits (T, width): the last that is used is the shared expert's gate. The kernel ahead writes neither them nor `routed`.
    """
    tokens, hidden = out.shape
    block = min(1024, triton.next_power_of_2(hidden))
    top = mixer.experts_per_token
    launch(
        _add_up, (tokens, triton.cdiv(hidden, block)),
        y, routed.shares, shared, logits, live, out, hidden, top, triton.next_power_of_2(top), mixer.num_experts,
        logits.shape[1], mixer.normed_shares, shared is not None, shared is not None and mixer.shared_gate, add, block,
        num_warps=4,
    )  # fmt: skip
