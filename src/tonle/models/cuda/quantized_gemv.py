# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,assignment,var-annotated"
"""A matrix of few-bit numbers times one row: as `gemv.py`, with half or a quarter of the bytes to read.

Does: out = act(norm(x) @ W.T + bias) (+ out), with fused multiply-adds on numbers unpacked in registers (`few_bits.py`);
adapters as `gemv_adapter.py` has them. A program takes a few outputs and all their inputs, unrolled, so the first words are under
way before the kernel ahead has ended. Does not: serve more rows (`quantized_dot.py`).

Unpacking and x are arithmetic that competes with reading: a thread converts an x once for all its outputs, so programs have few
warps and several outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tonle.models.cuda.few_bits import AT_ONCE, FORMS, FP8_FACTOR, offset, values
from tonle.models.cuda.gemv import _bias, _finish
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
from tonle.models.cuda.gpu_features import multiplies_fp8
from tonle.models.cuda.launch import follow, launch
from tonle.models.packed import WORDS, Packed

_INT4, _INT8, _FP8 = (tl.constexpr(FORMS[form]) for form in ("int4", "int8", "fp8"))
_FACTOR = tl.constexpr(FP8_FACTOR)


@dataclass(frozen=True, slots=True)
class QuantizedTiling:
    """How one product is cut into programs: outputs, and blocks of 32 words at a time."""

    block_n: int  # outputs
    blocks: int
    warps: int
    ahead: int = 1  # turns whose words are read before the kernel ahead has ended


@dataclass(frozen=True, slots=True)
class Layout:
    """What a kernel is compiled for, of a packed weight."""

    blocks: int
    places: int  # numbers of a word
    span: int  # places of a block that share a scale: all of them where a group is a block or more
    group: int  # inputs of a scale; 0: one for each output
    groups: int
    form: int
    at_once: int  # numbers that `values` gives
    native: bool  # the GPU converts e4m3
    minimum: bool  # numbers have something added to them, group by group
    paired: bool  # two scales of a block, 16 bits each, in a word


def _paired(packed: Packed) -> bool:
    two = 2 * packed.group == WORDS * packed.places and packed.scale.shape[1] % 2 == 0
    return two and packed.scale.element_size() == 2 and (packed.minimum is None or packed.minimum.element_size() == 2)


def layout_of(packed: Packed) -> Layout:
    places, group = packed.places, packed.group
    span = places if group == 0 or group >= WORDS * places else group // WORDS
    return Layout(packed.num_blocks, places, span, group, packed.scale.shape[1], FORMS[packed.form],
                  AT_ONCE[FORMS[packed.form]], multiplies_fp8(),
                  packed.minimum is not None, _paired(packed))  # fmt: skip


@triton.jit
def _scales(SCALE, n, b, live, LAYOUT: tl.constexpr):
    """Scales (BB, BN) of blocks b and outputs n, as they are read: one for each span of a block, or two in a word."""
    IN_BLOCK: tl.constexpr = 32 * LAYOUT.places
    some = live[None, :] & (b < LAYOUT.blocks)[:, None]
    if LAYOUT.paired:
        pairs = SCALE.to(tl.pointer_type(tl.int32)) + n[None, :] * (LAYOUT.groups // 2) + b[:, None]
        return (tl.load(pairs, mask=some, other=0),)
    else:
        PLACES: tl.constexpr = LAYOUT.places
        SPAN: tl.constexpr = LAYOUT.span
        found = ()
        for p in tl.static_range(0, PLACES, SPAN):
            group = (b * IN_BLOCK + p * 32) // LAYOUT.group
            found += (tl.load(SCALE + n[None, :] * LAYOUT.groups + group[:, None], mask=some, other=0.0),)
        return found


@triton.jit
def _scale(scales, p: tl.constexpr, TYPE: tl.constexpr, LAYOUT: tl.constexpr):
    """Of the span that begins at place p, float32."""
    if LAYOUT.paired:
        bits = scales[0] if p == 0 else scales[0] >> 16
        return bits.to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    else:
        return scales[p // LAYOUT.span].to(tl.float32)


@triton.jit
def _words(
    own, first: tl.constexpr, blk, live, N: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr, LAYOUT: tl.constexpr
):
    """Words (BB, BN, 32) of blocks from `first` on."""
    if N % BN == 0 and first + BB <= LAYOUT.blocks:
        return tl.load(own + first * 32)
    else:
        some = live[None, :, None] & (first + blk < LAYOUT.blocks)[:, None, None]
        return tl.load(own + first * 32, mask=some, other=0)


@triton.jit
def _inputs(X, first: tl.constexpr, p: tl.constexpr, blk, j, K: tl.constexpr, BB: tl.constexpr, LAYOUT: tl.constexpr):
    """x or gain (BB, 32) at place p of blocks from `first` on, float32."""
    IN_BLOCK: tl.constexpr = 32 * LAYOUT.places
    k = (first + blk)[:, None] * IN_BLOCK + p * 32 + j[None, :]
    if (first + BB) * IN_BLOCK <= K:
        return tl.load(X + k).to(tl.float32)
    else:
        return tl.load(X + k, mask=k < K, other=0.0).to(tl.float32)


@triton.jit
def _dotted(sums, w, xs, begin_: tl.constexpr, TABLE, DTYPE: tl.constexpr, LAYOUT: tl.constexpr):
    """sums (BB, BN, 32) + numbers of a span times x, of which `xs` has one (BB, 32) for each place."""
    SPAN: tl.constexpr = LAYOUT.span
    STEP: tl.constexpr = LAYOUT.at_once
    for p in tl.static_range(begin_, begin_ + SPAN):
        if p % STEP == 0 or p == begin_:
            some = values(w, p - p % STEP, TABLE, LAYOUT.form, LAYOUT.native, DTYPE)
        sums += some[p % STEP] * xs[p - begin_][:, None, :]
    return sums


@triton.jit
def _both_scales(SCALE, SHIFT, n, b, live, LAYOUT: tl.constexpr):
    """Scales and minimums as `_scales` reads them; none where there are none."""
    scales = ()
    shifts = ()
    if LAYOUT.group > 0:
        scales = _scales(SCALE, n, b, live, LAYOUT)
    if LAYOUT.minimum:
        shifts = _scales(SHIFT, n, b, live, LAYOUT)
    return scales, shifts


@triton.jit
def _added(acc, w, xs, offsets, total, scales, shifts, begin_: tl.constexpr, SCALE, SHIFT, TABLE, DTYPE: tl.constexpr,
           LAYOUT: tl.constexpr):  # fmt: skip
    """acc (BB, BN, 32) and what a span of words adds to it: scaled where each group has a scale of its own."""
    if LAYOUT.group > 0:
        part = tl.zeros(acc.shape, tl.float32) + offsets[:, None, :]
        if LAYOUT.minimum:
            part += total[:, None, :] * _scale(shifts, begin_, SHIFT.dtype.element_ty, LAYOUT)[:, :, None]
        part = _dotted(part, w, xs, begin_, TABLE, DTYPE, LAYOUT)
        return acc + part * _scale(scales, begin_, SCALE.dtype.element_ty, LAYOUT)[:, :, None]
    else:
        return _dotted(acc, w, xs, begin_, TABLE, DTYPE, LAYOUT)


@triton.jit
def _summed(acc, one, LAYOUT: tl.constexpr):
    """Sums (BN,) of acc (BB, BN, 32), times their outputs' scales if they have one each."""
    y = tl.sum(tl.sum(acc, 2), 0)
    if LAYOUT.form == _FP8 and not LAYOUT.native:
        y *= _FACTOR
    if LAYOUT.group == 0:
        y *= one
    return y


@triton.jit
def _products(tile, X, GAIN, W, SCALE, SHIFT, TABLE, BIAS, OUT, eps, B, SLOT, WORDS_, N: tl.constexpr, K: tl.constexpr,
              LAYOUT: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr, AHEAD: tl.constexpr, NORM: tl.constexpr,
              HAS_BIAS: tl.constexpr, ADD: tl.constexpr, SETTLED: tl.constexpr, GLU: tl.constexpr, CUT: tl.constexpr,
              PDL: tl.constexpr):  # fmt: skip
    """A few outputs. Up, where there is one, has the rows from N on."""
    FORM: tl.constexpr = LAYOUT.form
    BLOCKS: tl.constexpr = LAYOUT.blocks
    PLACES: tl.constexpr = LAYOUT.places
    SPAN: tl.constexpr = LAYOUT.span
    DTYPE: tl.constexpr = OUT.dtype.element_ty
    WHOLE: tl.constexpr = FORM == _INT4 or FORM == _INT8  # numbers have an offset
    GROUPED: tl.constexpr = LAYOUT.group > 0
    n = tile * BN + tl.arange(0, BN)
    live = n < N
    blk = tl.arange(0, BB)
    j = tl.arange(0, 32)
    own = W + n.to(tl.int64)[None, :, None] * (BLOCKS * 32) + (blk[:, None] * 32 + j[None, :])[:, None, :]
    ws = ()
    us = ()
    for first in tl.static_range(0, AHEAD * BB, BB):
        ws += (_words(own, first, blk, live, N, BN, BB, LAYOUT),)
        if GLU:
            us += (_words(own + N * (BLOCKS * 32), first, blk, live, N, BN, BB, LAYOUT),)
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
    one = 1.0
    one_up = 1.0
    if not GROUPED:
        one = tl.load(SCALE + n, mask=live, other=0.0).to(tl.float32)
        if GLU:
            one_up = tl.load(SCALE + N + n, mask=live, other=0.0).to(tl.float32)
    if ADD and SETTLED:
        before = tl.load(OUT + n, mask=live, other=0.0)
    follow(PDL)
    if ADD and not SETTLED:  # here and not after the sums, where everything would wait for it
        before = tl.load(OUT + n, mask=live, other=0.0)
    acc = tl.zeros([BB, BN, 32], tl.float32)
    up = tl.zeros([BB, BN, 32], tl.float32)
    squares = tl.zeros([BB, 32], tl.float32)
    offsets = tl.zeros([BB, 32], tl.float32)  # what is in all sums of numbers and x, per output alike
    for first in tl.static_range(0, BLOCKS, BB):
        if first < AHEAD * BB:
            w = ws[first // BB]
        else:
            w = _words(own, first, blk, live, N, BN, BB, LAYOUT)
        scales, shifts = _both_scales(SCALE, SHIFT, n, first + blk, live, LAYOUT)
        if GLU:
            if first < AHEAD * BB:
                u = us[first // BB]
            else:
                u = _words(own + N * (BLOCKS * 32), first, blk, live, N, BN, BB, LAYOUT)
            scales_up, shifts_up = _both_scales(SCALE, SHIFT, N + n, first + blk, live, LAYOUT)
        for begin_ in tl.static_range(0, PLACES, SPAN):
            if GROUPED:
                offsets = tl.zeros([BB, 32], tl.float32)
            total = tl.zeros([BB, 32], tl.float32)
            xs = ()
            for p in tl.static_range(begin_, begin_ + SPAN):
                x = _inputs(X, first, p, blk, j, K, BB, LAYOUT)
                if NORM:
                    squares += x * x
                    x *= _inputs(GAIN, first, p, blk, j, K, BB, LAYOUT)
                if WHOLE:
                    offsets -= x * offset(p, FORM)
                total += x
                xs += (x,)
            acc = _added(acc, w, xs, offsets, total, scales, shifts, begin_, SCALE, SHIFT, TABLE, DTYPE, LAYOUT)
            if GLU:
                up = _added(up, u, xs, offsets, total, scales_up, shifts_up, begin_, SCALE, SHIFT, TABLE, DTYPE, LAYOUT)
    if CUT is not None:  # first read here: mostly it is there, and read by the time the sums are
        words = words_of(WORDS_, tile * BN, CUT)
        if GLU:
            words_up = words_of(WORDS_, N + tile * BN, CUT)
            b = b_of(B, slot, n, live, CUT)  # twice as many as others have: too much to hold all the time
            b_up = b_of(B, slot, N + n, live, CUT)
    if WHOLE and not GROUPED:
        acc += offsets[:, None, :]
        up += offsets[:, None, :]
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(tl.reshape(squares, (BB * 32,)), 0) / K + eps)
    y = _summed(acc, one, LAYOUT)
    y_up = _summed(up, one_up, LAYOUT)
    if CUT is not None:
        y += expanded(words, b, WORDS_, tile * BN, CUT)
        if GLU:
            y_up += expanded(words_up, b_up, WORDS_, N + tile * BN, CUT)
    y = _finish(y, y_up, scale, n, live, BIAS, bias, bias_up, N, HAS_BIAS, GLU, DTYPE)
    if ADD:
        y = (y.to(tl.float32) + before.to(tl.float32)).to(DTYPE)
    tl.store(OUT + n, y, mask=live)


@triton.jit
def _quantized_gemv(X, GAIN, W, SCALE, SHIFT, TABLE, BIAS, OUT, eps, A, B, SLOT, WORDS_, N: tl.constexpr, K: tl.constexpr,
                    LAYOUT: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr, AHEAD: tl.constexpr, NORM: tl.constexpr,
                    HAS_BIAS: tl.constexpr, ADD: tl.constexpr, SETTLED: tl.constexpr, GLU: tl.constexpr,
                    CUT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    SHRINKING: tl.constexpr = 0 if CUT is None else CUT.programs  # the first ones
    program = tl.program_id(0)
    if SHRINKING == 0:
        _products(program, X, GAIN, W, SCALE, SHIFT, TABLE, BIAS, OUT, eps, B, SLOT, WORDS_, N, K, LAYOUT, BN, BB, AHEAD,
                  NORM, HAS_BIAS, ADD, SETTLED, GLU, CUT, PDL)  # fmt: skip
    else:
        if program < SHRINKING:
            shrink(X, GAIN, A, SLOT, WORDS_, K, NORM, CUT, PDL)
        else:
            _products(program - SHRINKING, X, GAIN, W, SCALE, SHIFT, TABLE, BIAS, OUT, eps, B, SLOT, WORDS_, N, K, LAYOUT,
                      BN, BB, AHEAD, NORM, HAS_BIAS, ADD, SETTLED, GLU, CUT, PDL)  # fmt: skip


def quantized_gemv_tiling(packed: Packed, *, glu: bool) -> QuantizedTiling:
    """Found by trying some twenty on an H200. One warp reads four blocks, four words a thread; more outputs spill registers."""
    blocks, outputs = packed.num_blocks, packed.shape[0]
    if blocks <= 4:
        return QuantizedTiling(4, triton.next_power_of_2(blocks), warps=1)
    if blocks > 64:
        return QuantizedTiling(4, triton.next_power_of_2(triton.cdiv(blocks, 8)), warps=4)
    if packed.places == 8:
        if glu:
            return QuantizedTiling(4, 4, warps=1)
        if outputs > 4096:
            return QuantizedTiling(4, 4, warps=1, ahead=2)
        return QuantizedTiling(8 if blocks <= 16 else 4, 16, warps=4)
    if glu or outputs > 16384:  # with a scale for each group, eight outputs of a warp spill registers
        return QuantizedTiling(8, 4, warps=1) if packed.group == 0 else QuantizedTiling(4, 8, warps=4)
    return QuantizedTiling(4, 8, warps=2, ahead=2)


def quantized_gemv(
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
    tiling: QuantizedTiling | None = None,
    adapter: OneRowAdapter | None = None,
) -> torch.Tensor:
    """As `gemv`: x (1, K), out (1, N); packed (N, K), or (2 N, K) where `glu` names an activation. `table`: its `table_words`."""
    inputs, outputs = x.shape[1], out.shape[1]
    tiling = tiling or quantized_gemv_tiling(packed, glu=bool(glu))
    tiles = triton.cdiv(outputs, tiling.block_n)
    if adapter is None:
        programs, cut, parts, options = tiles, None, (None, None, None, None), {}
    else:
        assert glu or all(size % tiling.block_n == 0 for size in adapter.sizes[:-1])  # a tile is of one module
        cut = begin(adapter, x, gain, tiling.warps)
        programs, parts = cut.programs + tiles, (adapter.a, adapter.b, adapter.slot, adapter.scratch.words)
        options = adapted_options(97)
    ahead = min(tiling.ahead, triton.cdiv(packed.num_blocks, tiling.blocks))
    launch(
        _quantized_gemv, (programs,),
        x, gain, packed.numbers, packed.scale, packed.minimum, table, bias, out, eps, *parts, outputs, inputs,
        layout_of(packed), tiling.block_n, tiling.blocks, ahead, gain is not None, bias is not None, add, settled, glu, cut,
        num_warps=tiling.warps, **options,
    )  # fmt: skip
    return out
