# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,assignment,var-annotated"
"""A matrix times one row, where time is reading the weight once: norm, activation and residual ride along.

Does: out = act(norm(x) @ W.T + bias) (+ out), with fused multiply-adds on whole rows of W. A norm's scale is one number,
so it is applied to the result; its sum of squares is taken in the same pass. With an adapter W is W + B A: `gemv_adapter.py`
has its parts, and without one nothing of them is compiled. Does not: serve more rows (`skinny.py`, cuBLAS).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tonle.models.cuda.activation import activated, gate_of
from tonle.models.cuda.gemv_adapter import (
    OneRowAdapter,
    adapted_options,
    ask_for_b,
    b_of,
    begin,
    expanded,
    shrink,
    words_of,
)
from tonle.models.cuda.launch import follow, launch
from tonle.models.spec import Activation


@dataclass(frozen=True, slots=True)
class GemvTiling:
    """How one product is cut into programs: outputs and inputs at a time."""

    block_n: int
    block_k: int
    warps: int
    stages: int = 0  # blocks of W under way at a time; 0 = all of them, unrolled
    ahead: int = 1  # unrolled: blocks of W that are read before the kernel ahead has ended


@triton.jit
def _bias(BIAS, n, live, early):
    if early is None:
        return tl.load(BIAS + n, mask=live, other=0.0)
    else:
        return early


@triton.jit
def _finish(y, gate_up, scale, n, live, BIAS, early, early_up, N: tl.constexpr, HAS_BIAS: tl.constexpr, GLU: tl.constexpr,
            DTYPE: tl.constexpr):  # fmt: skip
    """Norm scale, bias and activation on float32 sums; rounded where separate torch operations would round.

    `early` is the bias where it has been read already, else None.
    """
    y *= scale
    if HAS_BIAS:
        y += _bias(BIAS, n, live, early).to(tl.float32)
    if GLU:
        gate = y.to(DTYPE).to(tl.float32)
        up = gate_up * scale
        if HAS_BIAS:
            up += _bias(BIAS, N + n, live, early_up).to(tl.float32)
        y = activated(gate, GLU).to(DTYPE).to(tl.float32) * up.to(DTYPE).to(tl.float32)
    return y.to(DTYPE)


@triton.jit
def _unrolled(tile, X, GAIN, W, BIAS, OUT, eps, B, SLOT, WORDS, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr,
              BK: tl.constexpr, AHEAD: tl.constexpr, NORM: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr,
              SETTLED: tl.constexpr, GLU: tl.constexpr, CUT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """A few rows of W, all their columns unrolled: the first blocks are under way before the kernel ahead has ended."""
    n = tile * BN + tl.arange(0, BN)
    live = n < N
    k = tl.arange(0, BK)
    own = W + n.to(tl.int64)[:, None] * K + k[None, :]  # (BN, BK) pointers
    ws = ()
    us = ()
    for first in tl.static_range(0, AHEAD * BK, BK):
        some = live[:, None] & (first + k < K)[None, :]
        ws += (tl.load(own + first, mask=some, other=0.0),)
        if GLU:
            us += (tl.load(own + N * K + first, mask=some, other=0.0),)
    bias = None
    bias_up = None
    if CUT is not None:  # weights, too: they need not wait
        slot = tl.load(SLOT)
        if HAS_BIAS:
            bias = _bias(BIAS, n, live, None)
        if GLU:
            ask_for_b(B, slot, n, live, CUT)
            ask_for_b(B, slot, N + n, live, CUT)
            if HAS_BIAS:
                bias_up = _bias(BIAS, N + n, live, None)
        else:
            b = b_of(B, slot, n, live, CUT)
    if ADD and SETTLED:
        before = tl.load(OUT + n, mask=live, other=0.0)
    follow(PDL)
    if ADD and not SETTLED:  # here and not after the sums, where everything would wait for it
        before = tl.load(OUT + n, mask=live, other=0.0)
    acc = tl.zeros([BN, BK], tl.float32)
    up = tl.zeros([BN, BK], tl.float32)
    squares = tl.zeros([BK], tl.float32)
    for first in tl.static_range(0, K, BK):
        inside = first + k < K
        some = live[:, None] & inside[None, :]
        if first < AHEAD * BK:
            w = ws[first // BK]
        else:
            w = tl.load(own + first, mask=some, other=0.0)
        x = tl.load(X + first + k, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(GAIN + first + k, mask=inside, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * x[None, :]
        if GLU:
            if first < AHEAD * BK:
                u = us[first // BK]
            else:
                u = tl.load(own + N * K + first, mask=some, other=0.0)
            up += u.to(tl.float32) * x[None, :]
    if CUT is not None:  # first read here: mostly it is there, and read by the time the sums are
        words = words_of(WORDS, tile * BN, CUT)
        if GLU:
            words_up = words_of(WORDS, N + tile * BN, CUT)
            b = b_of(B, slot, n, live, CUT)  # twice as many as others have: too much to hold all the time
            b_up = b_of(B, slot, N + n, live, CUT)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    y = tl.sum(acc, 1)
    y_up = tl.sum(up, 1)
    if CUT is not None:
        y += expanded(words, b, WORDS, tile * BN, CUT)
        if GLU:
            y_up += expanded(words_up, b_up, WORDS, N + tile * BN, CUT)
    y = _finish(y, y_up, scale, n, live, BIAS, bias, bias_up, N, HAS_BIAS, GLU, OUT.dtype.element_ty)
    if ADD:
        y = (y.to(tl.float32) + before.to(tl.float32)).to(OUT.dtype.element_ty)
    tl.store(OUT + n, y, mask=live)


@triton.jit
def _gemv_unrolled(X, GAIN, W, BIAS, OUT, eps, A, B, SLOT, WORDS, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr,
                   BK: tl.constexpr, AHEAD: tl.constexpr, NORM: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr,
                   SETTLED: tl.constexpr, GLU: tl.constexpr, CUT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    SHRINKING: tl.constexpr = 0 if CUT is None else CUT.programs  # the first ones
    program = tl.program_id(0)
    if SHRINKING == 0:
        _unrolled(program, X, GAIN, W, BIAS, OUT, eps, B, SLOT, WORDS, N, K, BN, BK, AHEAD, NORM, HAS_BIAS, ADD, SETTLED, GLU,
                  CUT, PDL)  # fmt: skip
    else:
        if program < SHRINKING:
            shrink(X, GAIN, A, SLOT, WORDS, K, NORM, CUT, PDL)
        else:
            _unrolled(program - SHRINKING, X, GAIN, W, BIAS, OUT, eps, B, SLOT, WORDS, N, K, BN, BK, AHEAD, NORM, HAS_BIAS,
                      ADD, SETTLED, GLU, CUT, PDL)  # fmt: skip


@triton.jit
def _looped(tile, X, GAIN, W, BIAS, OUT, eps, B, SLOT, WORDS, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr,
            BK: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr,
            SETTLED: tl.constexpr, GLU: tl.constexpr, CUT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """A few rows of W, column block by column block: where unrolled ones are too many, or did worse."""
    n = tile * BN + tl.arange(0, BN)
    live = n < N
    k = tl.arange(0, BK)
    bias = None
    bias_up = None
    if CUT is not None:  # weights, too: they need not wait
        slot = tl.load(SLOT)
        if HAS_BIAS:
            bias = _bias(BIAS, n, live, None)
        if GLU:
            ask_for_b(B, slot, n, live, CUT)
            ask_for_b(B, slot, N + n, live, CUT)
            if HAS_BIAS:
                bias_up = _bias(BIAS, N + n, live, None)
        else:
            b = b_of(B, slot, n, live, CUT)
    if ADD and SETTLED:
        before = tl.load(OUT + n, mask=live, other=0.0)
    follow(PDL)
    if ADD and not SETTLED:
        before = tl.load(OUT + n, mask=live, other=0.0)
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
    if CUT is not None:  # first read here: mostly it is there, and read by the time the sums are
        words = words_of(WORDS, tile * BN, CUT)
        if GLU:
            words_up = words_of(WORDS, N + tile * BN, CUT)
            b = b_of(B, slot, n, live, CUT)  # twice as many as others have: too much to hold all the time
            b_up = b_of(B, slot, N + n, live, CUT)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    y = tl.sum(acc, 1)
    y_up = tl.sum(up, 1)
    if CUT is not None:
        y += expanded(words, b, WORDS, tile * BN, CUT)
        if GLU:
            y_up += expanded(words_up, b_up, WORDS, N + tile * BN, CUT)
    y = _finish(y, y_up, scale, n, live, BIAS, bias, bias_up, N, HAS_BIAS, GLU, OUT.dtype.element_ty)
    if ADD:
        y = (y.to(tl.float32) + before.to(tl.float32)).to(OUT.dtype.element_ty)
    tl.store(OUT + n, y, mask=live)


@triton.jit
def _gemv_looped(X, GAIN, W, BIAS, OUT, eps, A, B, SLOT, WORDS, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr,
                 BK: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr,
                 SETTLED: tl.constexpr, GLU: tl.constexpr, CUT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    SHRINKING: tl.constexpr = 0 if CUT is None else CUT.programs  # the first ones
    program = tl.program_id(0)
    if SHRINKING == 0:
        _looped(program, X, GAIN, W, BIAS, OUT, eps, B, SLOT, WORDS, N, K, BN, BK, STAGES, NORM, HAS_BIAS, ADD, SETTLED, GLU,
                CUT, PDL)  # fmt: skip
    else:
        if program < SHRINKING:
            shrink(X, GAIN, A, SLOT, WORDS, K, NORM, CUT, PDL)
        else:
            _looped(program - SHRINKING, X, GAIN, W, BIAS, OUT, eps, B, SLOT, WORDS, N, K, BN, BK, STAGES, NORM, HAS_BIAS,
                    ADD, SETTLED, GLU, CUT, PDL)  # fmt: skip


def gemv_tiling(outputs: int, inputs: int, *, norm: bool) -> GemvTiling:
    """Found by trying some hundred of them inside whole decode steps of models of 1.5, 3 and 8 billion weights on an H200."""
    width = triton.next_power_of_2(inputs)
    if inputs > (4096 if norm else 16384):
        return GemvTiling(8, 512, warps=8, stages=4)  # unrolled, so much would not fit into registers
    if inputs > 4096:
        return GemvTiling(2, 512, warps=2, ahead=5 if outputs < 2048 else 4)
    if inputs > 3072:
        return _gemv_tiling_4096(outputs, inputs, norm=norm)
    if outputs > 24576:
        return (
            GemvTiling(2, min(512, width), warps=2, stages=1)
            if inputs <= 2048
            else GemvTiling(4, 512, warps=4, stages=1)
        )
    if outputs > 6144:
        return GemvTiling(2, min(512, width), warps=2) if inputs <= 2048 else GemvTiling(1, 512, warps=2)
    if outputs > inputs or norm:
        return GemvTiling(4, 1024, warps=2) if inputs > 2048 else GemvTiling(4, min(512, width), warps=2)
    if inputs > 2048:
        return GemvTiling(4, 1024, warps=2, ahead=-(-inputs // 1024))
    block = min(512, width)
    return GemvTiling(2, block, warps=1, ahead=-(-inputs // block))


def _gemv_tiling_4096(outputs: int, inputs: int, *, norm: bool) -> GemvTiling:
    """Of more than 3,072 inputs, and up to 4,096."""
    if outputs > 24576:
        return GemvTiling(2, 1024, warps=2)
    if outputs > 6144:
        return GemvTiling(1, 512, warps=2, ahead=2)
    if outputs > inputs or norm:
        return GemvTiling(4, 512, warps=2)
    return GemvTiling(4, 1024, warps=4, ahead=-(-inputs // 1024))


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    gain: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    add: bool = False,
    settled: bool = False,
    glu: bool = False,
    activation: Activation = "silu",
    tiling: GemvTiling | None = None,
    adapter: OneRowAdapter | None = None,
) -> torch.Tensor:
    """x (1, K), weight (N, K), out (1, N), all contiguous; a weight with more rows than that is read up to there.

    `gain`: norm x first. `glu`: weight is (2 N, K), gate and up; out = activation(gate) * up. `add`: to what out holds;
    `settled`: the kernel ahead does not write that, so it is read before that one has ended. `adapter`: W is W + B A.
    """
    inputs, outputs = x.shape[1], out.shape[1]
    tiling = tiling or gemv_tiling(outputs, inputs, norm=gain is not None or glu)
    tiles = triton.cdiv(outputs, tiling.block_n)
    if adapter is None:
        programs, cut, parts, options = tiles, None, (None, None, None, None), {}
    else:
        assert glu or all(size % tiling.block_n == 0 for size in adapter.sizes[:-1])  # a tile is of one module
        cut = begin(adapter, x, gain, tiling.warps)
        programs, parts = cut.programs + tiles, (adapter.a, adapter.b, adapter.slot, adapter.scratch.words)
        share = tiling.block_n * inputs * (2 if glu else 1) // (tiling.warps * 32)
        options = adapted_options(share) if tiling.stages == 0 else {}
    if tiling.stages == 0:
        kernel, depth = _gemv_unrolled, tiling.ahead if x.element_size() == 2 else 1  # in registers
    else:
        kernel, depth = _gemv_looped, tiling.stages
    launch(
        kernel, (programs,),
        x, gain, weight, bias, out, eps, *parts, outputs, inputs, tiling.block_n, tiling.block_k, depth,
        gain is not None, bias is not None, add, settled, gate_of(activation, glu=glu), cut,
        num_warps=tiling.warps, **options,
    )  # fmt: skip
    return out
