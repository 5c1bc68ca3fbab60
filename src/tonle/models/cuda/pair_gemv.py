# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,assignment,var-annotated"
"""A matrix of few-bit numbers times one row of 16-bit activations: as `quantized_gemv.py`, with a quarter of its instructions.

Does: out = act(norm(x) @ W.T + bias) (+ out) for integers in groups of whole 128 inputs, or with a scale per output, and for e4m3
with the latter. A thread has four words side by side of each output, so it reads the inputs that belong to them by itself and
rounds them to 16 bits in its registers (`pair_dots.py`), once for all outputs of its program; nothing is exchanged before the
last sum. What an input is off by is at most a 35,000th of the largest of the 16 that a thread rounds together (e4m3: a 2,000th of
its own). Does not: serve adapters, tables, other groups (`quantized_gemv.py`) or more rows.

Tiles are (threads, outputs): Triton gives neighbouring threads the first of two axes that are equally far from contiguous. The
other way round each thread would have other inputs, through shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from tonle.models.cuda.few_bits import FP8, INT4, INT8
from tonle.models.cuda.gemv import _bias, _finish
from tonle.models.cuda.gpu_features import INTERPRETED, multiplies_fp8
from tonle.models.cuda.launch import follow, launch
from tonle.models.cuda.pair_dots import (
    EXTRA,
    dots_of_bytes,
    dots_of_eighths,
    dots_of_four_bits,
    four,
    rounded,
)
from tonle.models.cuda.quantized_gemv import layout_of
from tonle.models.packed import WORDS, Packed

_INT4, _INT8, _FP8 = tl.constexpr(INT4), tl.constexpr(INT8), tl.constexpr(FP8)
_EXTRA = tl.constexpr(EXTRA)
_SPAN = 128  # inputs: a group has as many, or a multiple
_REGISTERS = 136  # of a thread, for weights under way and inputs
_MANY_OUTPUTS = 16384


@dataclass(frozen=True, slots=True)
class PairTiling:
    """How one product is cut into programs. A warp takes four blocks of 32 words of each output."""

    block_n: int  # outputs at a time
    warps: int  # side by side along the inputs
    times: int = 1  # so many outputs of a program, one after another
    ahead: int = 1  # of these, read before the kernel ahead has ended


def suits(packed: Packed) -> bool:
    """Whether this kernel multiplies such a weight."""
    if packed.form == "fp8":
        return packed.group == 0 and (multiplies_fp8() or INTERPRETED)
    return packed.form in ("int4", "int8") and packed.group % _SPAN == 0


@triton.jit
def _scales(SCALE, n, b, some, MASKED: tl.constexpr, LAYOUT: tl.constexpr):
    """Float32 scales (T, BN) of blocks b: one, or one for each half of a block of four-bit numbers."""
    if LAYOUT.paired:
        pairs = SCALE.to(tl.pointer_type(tl.int32)) + n[None, :] * (LAYOUT.groups // 2) + b[:, None]
        if MASKED:
            return (tl.load(pairs, mask=some, other=0),)
        else:
            return (tl.load(pairs),)
    else:
        SPANS: tl.constexpr = LAYOUT.places // 4
        found = ()
        for half in tl.static_range(SPANS):
            group = (b * SPANS + half) * 128 // LAYOUT.group
            where = SCALE + n[None, :] * LAYOUT.groups + group[:, None]
            if MASKED:
                found += (tl.load(where, mask=some, other=0.0),)
            else:
                found += (tl.load(where),)
        return found


@triton.jit
def _scale(scales, half: tl.constexpr, TYPE: tl.constexpr, LAYOUT: tl.constexpr):
    if LAYOUT.paired and TYPE == tl.bfloat16:  # noqa: SIM300
        bits = scales[0] << 16 if half == 0 else scales[0] & -0x10000
        return bits.to(tl.float32, bitcast=True)
    elif LAYOUT.paired:
        bits = scales[0] if half == 0 else scales[0] >> 16
        return bits.to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    else:
        return scales[half].to(tl.float32)


@triton.jit
def _turn(own, SCALE, SHIFT, n, t, first: tl.constexpr, WHOLE: tl.constexpr, N: tl.constexpr, LAYOUT: tl.constexpr):
    """Words (T, BN, 4) of blocks from `first` on, their scales and minimums."""
    MASKED: tl.constexpr = not WHOLE or first + t.shape[0] // 8 > LAYOUT.blocks
    b = first + t // 8
    some = (n < N)[None, :] & (b < LAYOUT.blocks)[:, None]
    if MASKED:
        words = tl.load(own + first * 32, mask=some[:, :, None], other=0)
    else:
        words = tl.load(own + first * 32)
    scales = ()
    shifts = ()
    if LAYOUT.group > 0:
        scales = _scales(SCALE, n, b, some, MASKED, LAYOUT)
    if LAYOUT.minimum:
        shifts = _scales(SHIFT, n, b, some, MASKED, LAYOUT)
    return words, scales, shifts


@triton.jit
def _ask(W, SCALE, SHIFT, n, WHOLE: tl.constexpr, N: tl.constexpr, T: tl.constexpr, LAYOUT: tl.constexpr):
    """What is read of outputs n, turn by turn. WHOLE: there are no programs that have fewer."""
    BLOCKS: tl.constexpr = LAYOUT.blocks
    t = tl.arange(0, T)
    i = tl.arange(0, 4)
    own = W + n.to(tl.int64)[None, :, None] * (BLOCKS * 32) + (t[:, None] * 4 + i[None, :])[:, None, :]
    found = ()
    for first in tl.static_range(0, BLOCKS, T // 8):
        found += (_turn(own, SCALE, SHIFT, n, t, first, WHOLE, N, LAYOUT),)
    return found


@triton.jit
def _raw(X, K: tl.constexpr, T: tl.constexpr, LAYOUT: tl.constexpr):
    """x or gain, all places (T, 4) of every turn."""
    IN_BLOCK: tl.constexpr = 32 * LAYOUT.places
    BLOCKS: tl.constexpr = LAYOUT.blocks
    PLACES: tl.constexpr = LAYOUT.places
    t = tl.arange(0, T)
    i = tl.arange(0, 4)
    found = ()
    for first in tl.static_range(0, BLOCKS, T // 8):
        for p in tl.static_range(PLACES):
            k = ((first + t // 8) * IN_BLOCK + p * 32 + t % 8 * 4)[:, None] + i[None, :]
            if (first + T // 8) * IN_BLOCK <= K:
                found += (tl.load(X + k),)
            else:
                found += (tl.load(X + k, mask=k < K, other=0.0),)
    return found


@triton.jit
def _inputs(xs, FORM: tl.constexpr):
    """Of one turn's x, place by place: what words are multiplied with, and by what the products are scaled.

    Pairs of four words; and for each span of four places the scale (T,) and, of integers, the sum of the inputs.
    """
    if FORM == _INT4:
        even, odd, scale = rounded(xs[0], xs[2], xs[1], xs[3], FORM)
        even_up, odd_up, scale_up = rounded(xs[4], xs[6], xs[5], xs[7], FORM)
        evens = (four(even), four(even_up))
        odds = (four(odd), four(odd_up))
        one = tl.full([scale.shape[0], 1], 0x11111111, tl.int32)
        lower, upper = dots_of_four_bits((one, one, one, one), evens, odds)
        totals = ((_row(lower) - _EXTRA) * scale, (_row(upper) - _EXTRA) * scale_up)
        return (evens, odds), (scale, scale_up), totals
    else:
        first, second, scale = rounded(xs[0], xs[1], xs[2], xs[3], FORM)
        pairs = (four(first), four(second))
        if FORM == _INT8:
            one = tl.full([scale.shape[0], 1], 0x01010101, tl.int32)
            return pairs, (scale,), (_row(dots_of_bytes((one, one, one, one), pairs[0], pairs[1])) * scale,)
        else:
            return pairs, (scale,), ()


@triton.jit
def _row(v):
    """(T, 1) -> (T,)."""
    return tl.sum(v, 1)


@triton.jit
def _all_inputs(X, GAIN, K: tl.constexpr, T: tl.constexpr, NORM: tl.constexpr, LAYOUT: tl.constexpr):
    """`_inputs` of every turn, all read before any is used; and the sum (T,) of squares for a norm."""
    PLACES: tl.constexpr = LAYOUT.places
    TURNS: tl.constexpr = (LAYOUT.blocks + T // 8 - 1) // (T // 8)
    squares = tl.zeros([T, 4], tl.float32)
    raw = _raw(X, K, T, LAYOUT)
    gains = ()
    if NORM:
        gains = _raw(GAIN, K, T, LAYOUT)
    found = ()
    for turn in tl.static_range(TURNS):
        xs = ()
        for p in tl.static_range(PLACES):
            x = raw[turn * PLACES + p].to(tl.float32)
            if NORM:
                squares += x * x
                x *= gains[turn * PLACES + p].to(tl.float32)
            xs += (x,)
        found += (_inputs(xs, LAYOUT.form),)
    return found, squares


@triton.jit
def _scaled(acc, dot, span: tl.constexpr, scale, total, scales, shifts, SCALE, SHIFT, LAYOUT: tl.constexpr):
    """acc (T, BN) and the products of integers that share a scale."""
    ZERO: tl.constexpr = 8.0 if LAYOUT.form == _INT4 else 128.0
    fixed = (total * -ZERO)[:, None]
    if LAYOUT.form == _INT4:
        fixed -= (scale * _EXTRA)[:, None]
    if LAYOUT.minimum:
        fixed = _scale(shifts, span, SHIFT.dtype.element_ty, LAYOUT) * total[:, None] + fixed
    part = dot * scale[:, None] + fixed
    if LAYOUT.group > 0:
        return acc + part * _scale(scales, span, SCALE.dtype.element_ty, LAYOUT)
    else:
        return acc + part


@triton.jit
def _sums(asked, inputs, SCALE, SHIFT, one, BN: tl.constexpr, T: tl.constexpr, LAYOUT: tl.constexpr):
    """Products (BN,) of what was asked for, turn by turn. `one`: the outputs' scales, where groups have none."""
    TURNS: tl.constexpr = (LAYOUT.blocks + T // 8 - 1) // (T // 8)
    acc = tl.zeros([T, BN], tl.float32)
    for turn in tl.static_range(TURNS):
        words, scales, shifts = asked[turn]
        pairs, own, totals = inputs[turn]
        ws = four(words)
        if LAYOUT.form == _INT4:
            lower, upper = dots_of_four_bits(ws, pairs[0], pairs[1])
            acc = _scaled(acc, lower, 0, own[0], totals[0], scales, shifts, SCALE, SHIFT, LAYOUT)
            acc = _scaled(acc, upper, 1, own[1], totals[1], scales, shifts, SCALE, SHIFT, LAYOUT)
        elif LAYOUT.form == _INT8:
            dot = dots_of_bytes(ws, pairs[0], pairs[1])
            acc = _scaled(acc, dot, 0, own[0], totals[0], scales, shifts, SCALE, SHIFT, LAYOUT)
        else:
            first, second = dots_of_eighths(ws, pairs[0], pairs[1])
            acc += first * own[0][:, None]
            acc += second * own[0][:, None]
    y = tl.sum(acc, 0)
    if LAYOUT.group == 0:
        y *= one
    return y


@triton.jit
def _asked(W, SCALE, SHIFT, n, WHOLE: tl.constexpr, N: tl.constexpr, T: tl.constexpr, GLU: tl.constexpr,
           LAYOUT: tl.constexpr):  # fmt: skip
    """`_ask` of outputs n, and of their rows of up."""
    both = (_ask(W, SCALE, SHIFT, n, WHOLE, N, T, LAYOUT),)
    if GLU:
        UP: tl.constexpr = N * LAYOUT.blocks * 32
        GROUPS: tl.constexpr = N * LAYOUT.groups
        shift_up = None
        if LAYOUT.minimum:
            shift_up = SHIFT + GROUPS
        both += (_ask(W + UP, SCALE + GROUPS, shift_up, n, WHOLE, N, T, LAYOUT),)
    return both


@triton.jit
def _pair_gemv(X, GAIN, W, SCALE, SHIFT, BIAS, OUT, eps, N: tl.constexpr, K: tl.constexpr, LAYOUT: tl.constexpr,
               BN: tl.constexpr, T: tl.constexpr, TIMES: tl.constexpr, AHEAD: tl.constexpr, NORM: tl.constexpr,
               HAS_BIAS: tl.constexpr, ADD: tl.constexpr, SETTLED: tl.constexpr, GLU: tl.constexpr,
               PDL: tl.constexpr):  # fmt: skip
    """Up, where there is one, has the rows from N on."""
    DTYPE: tl.constexpr = OUT.dtype.element_ty
    WHOLE: tl.constexpr = N % (TIMES * BN) == 0
    start = tl.program_id(0) * (TIMES * BN) + tl.arange(0, BN)
    asked = ()
    for time in tl.static_range(AHEAD):
        asked += (_asked(W, SCALE, SHIFT, start + time * BN, WHOLE, N, T, GLU, LAYOUT),)
    biases = ()
    befores = ()
    ones = ()
    for time in tl.static_range(TIMES):  # weights, too: they need not wait
        n = start + time * BN
        live = n < N
        if HAS_BIAS:
            biases += (_bias(BIAS, n, live, None),)
            if GLU:
                biases += (_bias(BIAS, N + n, live, None),)
        if LAYOUT.group == 0:
            ones += (tl.load(SCALE + n, mask=live, other=0.0).to(tl.float32),)
            if GLU:
                ones += (tl.load(SCALE + N + n, mask=live, other=0.0).to(tl.float32),)
        if ADD and SETTLED:
            befores += (tl.load(OUT + n, mask=live, other=0.0),)
    follow(PDL)
    if ADD and not SETTLED:
        for time in tl.static_range(TIMES):
            n = start + time * BN
            befores += (tl.load(OUT + n, mask=n < N, other=0.0),)
    inputs, squares = _all_inputs(X, GAIN, K, T, NORM, LAYOUT)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(tl.reshape(squares, (T * 4,)), 0) / K + eps)
    EACH: tl.constexpr = 2 if GLU else 1
    for time in tl.static_range(TIMES):
        n = start + time * BN
        live = n < N
        if time + AHEAD < TIMES:
            asked += (_asked(W, SCALE, SHIFT, n + AHEAD * BN, WHOLE, N, T, GLU, LAYOUT),)
        one = 1.0
        one_up = 1.0
        bias = None
        bias_up = None
        if LAYOUT.group == 0:
            one = ones[time * EACH]
            one_up = ones[time * EACH + EACH - 1]
        if HAS_BIAS:
            bias = biases[time * EACH]
            bias_up = biases[time * EACH + EACH - 1]
        y = _sums(asked[time][0], inputs, SCALE, SHIFT, one, BN, T, LAYOUT)
        y_up = 0.0
        if GLU:
            y_up = _sums(asked[time][1], inputs, SCALE, SHIFT, one_up, BN, T, LAYOUT)
        y = _finish(y, y_up, scale, n, live, BIAS, bias, bias_up, N, HAS_BIAS, GLU, DTYPE)
        if ADD:
            y = (y.to(tl.float32) + befores[time].to(tl.float32)).to(DTYPE)
        tl.store(OUT + n, y, mask=live)


def pair_gemv_tiling(packed: Packed, *, glu: bool) -> PairTiling:
    """Found by trying some ten for each product inside whole steps of a 3B model on an H200, then cut to what registers hold.

    A third of the instructions may be those that round inputs, so a program takes several outputs, one after another."""
    return _fitting(_wanted(packed, glu=glu), packed, glu=glu)


def _wanted(packed: Packed, *, glu: bool) -> PairTiling:
    outputs, inputs = packed.shape
    is_four, is_fp8 = packed.form == "int4", packed.form == "fp8"
    if glu:
        return PairTiling(4, 4, times=2) if is_four else PairTiling(2, 2, times=2)
    if outputs > _MANY_OUTPUTS:
        return PairTiling(4, 2, times=4)
    if inputs > 4096:
        return PairTiling(2, 8, times=4) if is_fp8 else PairTiling(4, 4, times=2)
    if outputs > inputs:
        if is_fp8:
            return PairTiling(8, 2)
        return PairTiling(8, 1) if is_four else PairTiling(8, 8, times=2)
    return PairTiling(4, 4, times=2, ahead=2) if is_four else PairTiling(4, 8, times=2)


def _fitting(tiling: PairTiling, packed: Packed, *, glu: bool) -> PairTiling:
    """With as many warps as have something to read; then more of them, or fewer outputs at a time, until registers hold it."""
    blocks, warps, block_n = packed.num_blocks, tiling.warps, tiling.block_n
    while warps > 1 and blocks <= 2 * warps:
        warps //= 2

    def registers() -> int:
        turns = triton.cdiv(blocks, 4 * warps)
        own = turns * (4 if packed.group == 0 else 6) * (2 if glu else 1)  # of an output
        return int(block_n * own + turns * packed.places * 5 // 2)

    while registers() > _REGISTERS and warps < 8:
        warps *= 2
    while registers() > _REGISTERS and block_n > 1:
        block_n //= 2
    return replace(tiling, block_n=block_n, warps=warps)


def pair_gemv(
    x: torch.Tensor,
    packed: Packed,
    out: torch.Tensor,
    *,
    gain: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    add: bool = False,
    settled: bool = False,
    glu: int = 0,
    tiling: PairTiling | None = None,
) -> torch.Tensor:
    """As `quantized_gemv`, for weights that `suits` names."""
    inputs, outputs = x.shape[1], out.shape[1]
    tiling = tiling or pair_gemv_tiling(packed, glu=bool(glu))
    assert outputs * (2 if glu else 1) == packed.shape[0]
    launch(
        _pair_gemv, (triton.cdiv(outputs, tiling.block_n * tiling.times),),
        x, gain, packed.numbers, packed.scale, packed.minimum, bias, out, eps, outputs, inputs, layout_of(packed),
        tiling.block_n, WORDS * tiling.warps, tiling.times, min(tiling.ahead, tiling.times), gain is not None,
        bias is not None, add, settled, glu, num_warps=tiling.warps,
    )  # fmt: skip
    return out
