# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
"""A matrix times one row, where time is reading the weight once: norm, activation and residual ride along.

Does: out = act(norm(x) @ W.T + bias) (+ out), with fused multiply-adds on whole rows of W. A norm's scale is one number,
so it is applied to the result; its sum of squares is taken in the same pass. Does not: serve more rows (`skinny.py`, cuBLAS).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tonle.models.cuda.dependent import follow, prefetch_bytes
from tonle.models.cuda.device import dependent_launch_available
from tonle.models.cuda.launch import launch


@dataclass(frozen=True, slots=True)
class Cut:
    """How one product is cut into programs: outputs and inputs at a time."""

    block_n: int
    block_k: int
    warps: int
    stages: int = 0  # blocks of W under way at a time; 0 = all of them, unrolled
    prefetch: bool = False  # ask for all of a program's weights in L2 at once


@triton.jit
def _finish(y, gate_up, scale, n, live, BIAS, N: tl.constexpr, HAS_BIAS: tl.constexpr, GLU: tl.constexpr,
            DTYPE: tl.constexpr):  # fmt: skip
    """Norm scale, bias and activation on float32 sums; rounded where separate torch operations would round."""
    y *= scale
    if HAS_BIAS:
        y += tl.load(BIAS + n, mask=live, other=0.0).to(tl.float32)
    if GLU:
        gate = y.to(DTYPE).to(tl.float32)
        up = gate_up * scale
        if HAS_BIAS:
            up += tl.load(BIAS + N + n, mask=live, other=0.0).to(tl.float32)
        y = (gate * tl.sigmoid(gate)).to(DTYPE).to(tl.float32) * up.to(DTYPE).to(tl.float32)
    return y.to(DTYPE)


@triton.jit
def _gemv_unrolled(X, GAIN, W, BIAS, OUT, eps, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                   NORM: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr, GLU: tl.constexpr,
                   PREFETCH: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """A few rows of W, all their columns unrolled: the first block is under way before the kernel ahead has ended."""
    pid = tl.program_id(0)
    n = pid * BN + tl.arange(0, BN)
    live = n < N
    k = tl.arange(0, BK)
    own = W + n.to(tl.int64)[:, None] * K + k[None, :]  # (BN, BK) pointers
    some = live[:, None] & (k < K)[None, :]
    w = tl.load(own, mask=some, other=0.0)
    u = w
    if GLU:
        u = tl.load(own + N * K, mask=some, other=0.0)
    if PREFETCH:
        _prefetch_rows(W, pid * BN, N, K, BN, GLU)
    follow(PDL)
    acc = tl.zeros([BN, BK], tl.float32)
    up = tl.zeros([BN, BK], tl.float32)
    squares = tl.zeros([BK], tl.float32)
    for first in tl.static_range(0, K, BK):
        inside = first + k < K
        if first > 0:
            some = live[:, None] & inside[None, :]
            w = tl.load(own + first, mask=some, other=0.0)
            if GLU:
                u = tl.load(own + N * K + first, mask=some, other=0.0)
        x = tl.load(X + first + k, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(GAIN + first + k, mask=inside, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * x[None, :]
        if GLU:
            up += u.to(tl.float32) * x[None, :]
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    y = _finish(tl.sum(acc, 1), tl.sum(up, 1), scale, n, live, BIAS, N, HAS_BIAS, GLU, OUT.dtype.element_ty)
    if ADD:
        y = (y.to(tl.float32) + tl.load(OUT + n, mask=live, other=0.0).to(tl.float32)).to(OUT.dtype.element_ty)
    tl.store(OUT + n, y, mask=live)


@triton.jit
def _prefetch_rows(W, first, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, GLU: tl.constexpr):
    """Rows first .. first + BN of W, if they are all there."""
    if first + BN <= N:
        share = W + first.to(tl.int64) * K
        size: tl.constexpr = BN * K * W.dtype.element_ty.primitive_bitwidth // 8
        prefetch_bytes(share, size)
        if GLU:
            prefetch_bytes(share + N * K, size)


@triton.jit
def _gemv_looped(X, GAIN, W, BIAS, OUT, eps, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                 STAGES: tl.constexpr, NORM: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr,
                 GLU: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """A few rows of W, column block by column block: where unrolled ones are too many, or did worse."""
    pid = tl.program_id(0)
    n = pid * BN + tl.arange(0, BN)
    live = n < N
    k = tl.arange(0, BK)
    if PREFETCH:
        _prefetch_rows(W, pid * BN, N, K, BN, GLU)
    follow(PDL)
    own = W + n.to(tl.int64)[:, None] * K + k[None, :]  # (BN, BK) pointers
    acc = tl.zeros([BN, BK], tl.float32)
    up = tl.zeros([BN, BK], tl.float32)
    squares = tl.zeros([BK], tl.float32)
    for first in tl.range(0, K, BK, num_stages=STAGES):
        inside = first + k < K
        some = live[:, None] & inside[None, :]
        x = tl.load(X + first + k, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(GAIN + first + k, mask=inside, other=0.0).to(tl.float32)
        acc += tl.load(own + first, mask=some, other=0.0).to(tl.float32) * x[None, :]
        if GLU:
            up += tl.load(own + N * K + first, mask=some, other=0.0).to(tl.float32) * x[None, :]
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    y = _finish(tl.sum(acc, 1), tl.sum(up, 1), scale, n, live, BIAS, N, HAS_BIAS, GLU, OUT.dtype.element_ty)
    if ADD:
        y = (y.to(tl.float32) + tl.load(OUT + n, mask=live, other=0.0).to(tl.float32)).to(OUT.dtype.element_ty)
    tl.store(OUT + n, y, mask=live)


def cut_for(outputs: int, inputs: int, *, norm: bool) -> Cut:
    """Found by trying some hundred of them inside whole decode steps of two models on an H200."""
    width = triton.next_power_of_2(inputs)
    if inputs > (4096 if norm else 16384):
        return Cut(8, 512, warps=8, stages=4)  # unrolled, so much would not fit into registers
    if inputs > 4096:
        return Cut(2, 512, warps=2) if outputs < 2048 else Cut(2, 256, warps=1)
    if outputs > 24576:
        return Cut(2, min(512, width), warps=2, stages=1) if inputs <= 2048 else Cut(4, 512, warps=4, stages=1)
    if outputs > 6144:
        return Cut(2, min(512, width), warps=2, stages=1) if inputs <= 2048 else Cut(1, 512, warps=2)
    if inputs > 2048:
        return Cut(4, 1024, warps=2 if outputs > inputs else 4)
    if outputs > inputs:
        return Cut(4, min(512, width), warps=2)
    return Cut(2, min(1024, width), warps=4, prefetch=True)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    gain: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    add: bool = False,
    glu: bool = False,
    cut: Cut | None = None,
) -> torch.Tensor:
    """x (1, K), weight (N, K), out (1, N), all contiguous.

    `gain`: norm x first. `glu`: weight is (2 N, K), gate and up; out = silu(gate) * up. `add`: to what out holds.
    """
    inputs, outputs = x.shape[1], out.shape[1]
    cut = cut or cut_for(outputs, inputs, norm=gain is not None)
    grid = (triton.cdiv(outputs, cut.block_n),)
    flags = (gain is not None, bias is not None, add, glu)
    prefetch = cut.prefetch and dependent_launch_available()
    if cut.stages == 0:
        launch(
            _gemv_unrolled, grid,
            x, gain, weight, bias, out, eps, outputs, inputs, cut.block_n, cut.block_k, *flags, prefetch,
            num_warps=cut.warps,
        )  # fmt: skip
    else:
        launch(
            _gemv_looped, grid,
            x, gain, weight, bias, out, eps, outputs, inputs, cut.block_n, cut.block_k, cut.stages, *flags, prefetch,
            num_warps=cut.warps,
        )  # fmt: skip
    return out
