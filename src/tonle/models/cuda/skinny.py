# mypy: allow-untyped-defs, disable-error-code="untyped-decorator,misc"
"""Matrix products with few rows, where time is reading the weight once: norm, activation and residual ride along.

Does: out = act(norm(x) @ W.T + bias) (+ out). One row: fused multiply-adds on whole rows of W. Up to `MAX_ROWS`: tensor
cores. A norm's scale is one number per row of x, so it is applied to the result; its sum of squares is taken in the
same pass. Does not: serve many rows; there cuBLAS wins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tonle.models.cuda.dependent import follow, launch_options

MAX_ROWS = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """How one product is cut: rows of W and columns per program."""

    block_n: int
    block_k: int
    warps: int
    stages: int = 1


@triton.jit
def _prefetch(W, first, num_bytes):
    """Ask for a program's whole share of W in L2, one instruction by one thread (Hopper)."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .u32 t;
        mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;
        @p cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r", [(W + first).to(tl.int64), num_bytes], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _gemv(X, GAIN, W, BIAS, OUT, eps, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
          NORM: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr, GLU: tl.constexpr, PREFETCH: tl.constexpr,
          PDL: tl.constexpr):  # fmt: skip
    pid = tl.program_id(0)
    n = pid * BN + tl.arange(0, BN)
    live = (n < N)[:, None]
    k = tl.arange(0, BK)
    W += n.to(tl.int64)[:, None] * K
    if PREFETCH:
        if pid * BN + BN <= N:
            _prefetch(W_BASE(W, n, K), 0, BN * K * 2)
    follow(PDL)
    acc = tl.zeros([BN, BK], tl.float32)
    up = tl.zeros([BN, BK], tl.float32)
    squares = tl.zeros([BK], tl.float32)
    for first in tl.static_range(0, K, BK):
        kk = first + k
        inside = kk < K
        x = tl.load(X + kk, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(GAIN + kk, mask=inside, other=0.0).to(tl.float32)
        acc += tl.load(W + kk[None, :], mask=live & inside[None, :], other=0.0).to(tl.float32) * x[None, :]
        if GLU:
            w = tl.load(W + N * K + kk[None, :], mask=live & inside[None, :], other=0.0)
            up += w.to(tl.float32) * x[None, :]
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
