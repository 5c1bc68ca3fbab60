# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,assignment,var-annotated"
"""The experts of a single row: only the weights of those it chose are read, each once, at the speed of memory.

Does: `one_row_gate_up` and `one_row_down`, with everything around them: norm, bias, activation, shares, the shared expert's part,
residual. There is no kernel that chooses: every program of both finds the row's experts in the router's logits by itself, which
takes half a microsecond; the second one, for which the logits are old, does so and begins to read weights while the first one is
still under way. Does not: compute logits (`experts.py`), or serve more rows (`experts_grouped.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tonle.models.cuda.experts_gate import EXPERT_GATES, gated
from tonle.models.cuda.experts_routing import best_of, keys_of, logit_of, nth_expert
from tonle.models.cuda.experts_weights import ExpertWeights
from tonle.models.cuda.launch import follow, launch
from tonle.models.spec import MixerSpec


@dataclass(frozen=True, slots=True)
class OneRowTiling:
    """How one product is cut into programs: outputs and inputs at a time."""

    block_n: int
    block_k: int
    warps: int
    ahead: int = 1  # down: blocks of W that are read before the kernel ahead has ended
    stages: int = 0  # down: blocks of W under way at a time; 0 = all of them, unrolled


def gate_up_tiling(size: int, hidden: int) -> OneRowTiling:
    """Found by trying nine on an H200. One warp: finding the best expert then takes no exchange between warps."""
    return OneRowTiling(2, min(512, triton.next_power_of_2(hidden)), warps=1)


_MOST_UNROLLED = 40  # blocks of W


def down_tiling(hidden: int, size: int, top: int) -> OneRowTiling:
    """Likewise, by trying ten."""
    block = min(512, size & -size)  # divides the size, so that no read is half empty
    if block < 128:
        block = min(512, triton.next_power_of_2(size))
    blocks = top * triton.cdiv(size, block)
    if blocks > _MOST_UNROLLED:
        return OneRowTiling(4, 512, warps=4, stages=4)
    return OneRowTiling(2, block, warps=1, ahead=min(12, blocks))


@triton.jit
def _gate_up(X, GAIN, LOGITS, W, BIAS, OUT, eps, N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
             BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr,
             CLAMP: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BN outputs of one of the row's experts: a few rows of gate and of up, all their columns unrolled."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    place = tl.program_id(1)
    live = n < N
    k = tl.arange(0, BK)
    scale = 1.0
    if NORM:  # the row is two kernels old
        squares = tl.zeros([BK], tl.float32)
        for first in tl.static_range(0, K, BK):
            x = tl.load(X + first + k, mask=first + k < K, other=0.0).to(tl.float32)
            squares += x * x
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    follow(PDL)
    expert = nth_expert(keys_of(LOGITS, E, EP), place, E, EP)
    own = W + expert.to(tl.int64) * (2 * N * K) + n[:, None] * K + k[None, :]  # (BN, BK) pointers
    acc = tl.zeros([BN, BK], tl.float32)
    up = tl.zeros([BN, BK], tl.float32)
    for first in tl.static_range(0, K, BK):
        inside = first + k < K
        some = live[:, None] & inside[None, :]
        w = tl.load(own + first, mask=some, other=0.0)
        u = tl.load(own + N * K + first, mask=some, other=0.0)
        x = tl.load(X + first + k, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            x *= tl.load(GAIN + first + k, mask=inside, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * x[None, :]
        up += u.to(tl.float32) * x[None, :]
    y = tl.sum(acc, 1) * scale
    y_up = tl.sum(up, 1) * scale
    if HAS_BIAS:
        y += tl.load(BIAS + expert * (2 * N) + n, mask=live, other=0.0).to(tl.float32)
        y_up += tl.load(BIAS + expert * (2 * N) + N + n, mask=live, other=0.0).to(tl.float32)
    y = gated(y, y_up, GATE, CLAMP, OUT.dtype.element_ty)
    tl.store(OUT + place * N + n, y.to(OUT.dtype.element_ty), mask=live)


def one_row_gate_up(
    x: torch.Tensor,
    logits: torch.Tensor,
    weights: ExpertWeights,
    mixer: MixerSpec,
    out: torch.Tensor,
    *,
    gain: torch.Tensor | None = None,
    eps: float = 0.0,
    tiling: OneRowTiling | None = None,
) -> None:
    """x (1, hidden), weights (experts, 2 * size, hidden) -> out (top, size), gated, best expert first.

    `gain`: norm x first. The kernel ahead writes logits (1, width), and not x.
    """
    (top, size), hidden = out.shape, x.shape[1]
    tiling = tiling or gate_up_tiling(size, hidden)
    experts = mixer.num_experts
    launch(
        _gate_up, (triton.cdiv(size, tiling.block_n), top),
        x, gain, logits, weights.weight, weights.bias, out, eps, size, hidden, experts, triton.next_power_of_2(experts),
        tiling.block_n, tiling.block_k, gain is not None, weights.bias is not None, EXPERT_GATES[mixer.activation], mixer.clamp,
        num_warps=tiling.warps,
    )  # fmt: skip


@triton.jit
def _block(W, expert, n, first, k, live, N: tl.constexpr, K: tl.constexpr):
    """(BN, BK) of W of an expert."""
    own = W + expert.to(tl.int64) * (N * K) + n[:, None] * K + first + k[None, :]
    return tl.load(own, mask=live[:, None] & (first + k < K)[None, :], other=0.0)


@triton.jit
def _down(A, LOGITS, W, BIAS, SHARED, OUT, N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
          TOP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr,
          HAS_BIAS: tl.constexpr, NORMED: tl.constexpr, HAS_SHARED: tl.constexpr, SHARED_GATE: tl.constexpr,
          ADD: tl.constexpr, SETTLED: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BN outputs: what all of the row's experts give, times their shares."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    live = n < N
    k = tl.arange(0, BK)
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    keys = keys_of(LOGITS, E, EP)  # two kernels old
    best = logit_of(tl.max(keys, 0))
    if NORMED:
        total = 0.0
    else:
        e = tl.arange(0, EP)
        total = tl.sum(tl.where(e < E, tl.exp(logit_of(keys) - best), 0.0), 0)
    experts = ()
    shares = ()
    ws = ()
    for place in tl.static_range(TOP):
        expert, key, keys = best_of(keys, E, EP)
        share = tl.exp(logit_of(key) - best)
        if NORMED:
            total += share
        experts += (expert,)
        shares += (share,)
        for block in tl.static_range(BLOCKS):
            if place * BLOCKS + block < AHEAD:
                ws += (_block(W, expert, n, block * BK, k, live, N, K),)
    if ADD and SETTLED:
        before = tl.load(OUT + n, mask=live, other=0.0)
    follow(PDL)
    if ADD and not SETTLED:
        before = tl.load(OUT + n, mask=live, other=0.0)
    y = tl.zeros([BN], tl.float32)
    acc = tl.zeros([BN, BK], tl.float32)
    for place in tl.static_range(TOP):
        part = tl.zeros([BN, BK], tl.float32)
        if STAGES == 0:
            for block in tl.static_range(BLOCKS):
                if place * BLOCKS + block < AHEAD:
                    w = ws[place * BLOCKS + block]
                else:
                    w = _block(W, experts[place], n, block * BK, k, live, N, K)
                a = tl.load(A + place * K + block * BK + k, mask=block * BK + k < K, other=0.0).to(tl.float32)
                part += w.to(tl.float32) * a[None, :]
        else:
            for first in tl.range(0, K, BK, num_stages=STAGES):
                a = tl.load(A + place * K + first + k, mask=first + k < K, other=0.0).to(tl.float32)
                part += _block(W, experts[place], n, first, k, live, N, K).to(tl.float32) * a[None, :]
        acc += part * shares[place]
        if HAS_BIAS:
            y += tl.load(BIAS + experts[place] * N + n, mask=live, other=0.0).to(tl.float32) * shares[place]
    y = (y + tl.sum(acc, 1)) / total
    if HAS_SHARED:
        shared = tl.load(SHARED + n, mask=live, other=0.0).to(tl.float32)
        if SHARED_GATE:
            shared *= tl.sigmoid(tl.load(LOGITS + E).to(tl.float32))
        y += shared
    if ADD:
        y += before.to(tl.float32)
    tl.store(OUT + n, y.to(OUT.dtype.element_ty), mask=live)


def one_row_down(
    x: torch.Tensor,
    logits: torch.Tensor,
    weights: ExpertWeights,
    shared: torch.Tensor | None,
    mixer: MixerSpec,
    out: torch.Tensor,
    *,
    add: bool,
    settled: bool = False,
    tiling: OneRowTiling | None = None,
) -> None:
    """x (top, size), weights (experts, hidden, size), shared (1, hidden) -> out (1, hidden).

    `add`: to what out holds; `settled`: the kernel ahead does not write that. It does not write logits (1, width) either, where
    the shared expert's gate comes after the experts.
    """
    (top, size), hidden = x.shape, out.shape[1]
    tiling = tiling or down_tiling(hidden, size, top)
    experts = mixer.num_experts
    ahead = 0 if tiling.stages else tiling.ahead
    launch(
        _down, (triton.cdiv(hidden, tiling.block_n),),
        x, logits, weights.weight, weights.bias, shared, out, hidden, size, experts, triton.next_power_of_2(experts), top,
        tiling.block_n, tiling.block_k, ahead, tiling.stages, weights.bias is not None, mixer.normed_shares,
        shared is not None, shared is not None and mixer.shared_gate, add, settled, num_warps=tiling.warps,
    )  # fmt: skip
