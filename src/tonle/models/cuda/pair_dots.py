# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,assignment,var-annotated"
"""Words of few-bit numbers times inputs of 16 bits, two at a time: what `pair_gemv.py` is made of.

Does: round the inputs of a thread, 16 at a time that share a scale, to whole numbers or halves that stand in pairs as words have
their numbers; multiply words with them. Integers: `dp2a`, two products of 16 and 8 bits and a sum, exact: eight numbers of four
bits take four of them and three instructions that take the word apart, four bytes two and none. e4m3: pairs of halves, eight
products added to each half before it becomes a float32. Does not: scale anything, or know of groups.

Sums of four-bit numbers begin at the bits of 1.5 * 2 ** 23 and stay below half of that: they are floats as they stand, which are
too large by it. Conversions run at a quarter of the rate.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tonle.models.cuda.few_bits import FP8, FP8_FACTOR, INT4, INT8, values
from tonle.models.cuda.gpu_features import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)
_INT4, _INT8, _FP8 = tl.constexpr(INT4), tl.constexpr(INT8), tl.constexpr(FP8)
_FP8_FACTOR = tl.constexpr(FP8_FACTOR)
EXTRA = 12582912.0
_EVEN = tl.constexpr(EXTRA)  # 1.5 * 2 ** 23: whole numbers added to it are its last bits
_EVEN_BITS = tl.constexpr(0x4B400000)
# The largest input. Of four bits: 16 * 15 * 17470 is below 2 ** 22. Of eight: 16 bits, and division is off by a little.
_MOST_OF_FOUR, _MOST_OF_EIGHT = tl.constexpr(17470.0), tl.constexpr(32760.0)
_LEAST = tl.constexpr(1e-30)  # smaller inputs are 0


@triton.jit
def four(v):
    """(..., 4) as its four columns."""
    if len(v.shape) == 3:
        even, odd = tl.split(tl.reshape(v, (v.shape[0], v.shape[1], 2, 2)))
    else:
        even, odd = tl.split(tl.reshape(v, (v.shape[0], 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _paired(a, b):
    """The lower 16 bits of two words in one."""
    if _INTERPRETED:
        return (a & 0xFFFF) | (b << 16)
    else:
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True,
                                         pack=1)  # fmt: skip


@triton.jit
def rounded(x0, x1, x2, x3, FORM: tl.constexpr):
    """Inputs (T, 4) at four places: two pairs of each word, (0, 1) and (2, 3), and the scale (T,) of all 16."""
    most = tl.max(tl.maximum(tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3))), 1)
    some = most > _LEAST
    MOST: tl.constexpr = _MOST_OF_FOUR if FORM == _INT4 else _MOST_OF_EIGHT if FORM == _INT8 else 1.0
    factor = tl.where(some, 1.0 / tl.where(some, most, 1.0) * MOST, 0.0)[:, None]
    scale = tl.where(some, most * (1.0 / MOST), 0.0)
    if FORM == _FP8:
        return _halves(x0 * factor, x1 * factor), _halves(x2 * factor, x3 * factor), scale
    else:
        a = (x0 * factor + _EVEN).to(tl.int32, bitcast=True)
        b = (x1 * factor + _EVEN).to(tl.int32, bitcast=True)
        c = (x2 * factor + _EVEN).to(tl.int32, bitcast=True)
        d = (x3 * factor + _EVEN).to(tl.int32, bitcast=True)
        return _paired(a, b), _paired(c, d), scale


@triton.jit
def _halves(a, b):
    """Two float32 as a pair of float16."""
    if _INTERPRETED:
        return _paired(a.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32),
                       b.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32))  # fmt: skip
    else:
        return tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True,
                                         pack=1)  # fmt: skip


@triton.jit
def _products(sums, pair, w, FIRST: tl.constexpr, SECOND: tl.constexpr, MASK: tl.constexpr):
    """What `dp2a` adds to sums: the pair times the numbers of w from bits FIRST and SECOND on."""
    return sums + ((pair << 16) >> 16) * ((w >> FIRST) & MASK) + (pair >> 16) * ((w >> SECOND) & MASK)


@triton.jit
def _four_bits(lower, upper, w, p02, p13, p46, p57):
    if _INTERPRETED:
        lower = _products(_products(lower, p02, w, 0, 8, 15), p13, w, 4, 12, 15)
        upper = _products(_products(upper, p46, w, 16, 24, 15), p57, w, 20, 28, 15)
        return lower, upper
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 even, odd, a, b;
            and.b32 even, $4, 0x0F0F0F0F; shr.u32 odd, $4, 4; and.b32 odd, odd, 0x0F0F0F0F;
            dp2a.lo.s32.u32 a, $5, even, $2; dp2a.hi.s32.u32 b, $7, even, $3;
            dp2a.lo.s32.u32 $0, $6, odd, a; dp2a.hi.s32.u32 $1, $8, odd, b;
            }""",
            "=&r,=&r,r,r,r,r,r,r,r", [lower, upper, w, p02, p13, p46, p57], dtype=(tl.int32, tl.int32), is_pure=True,
            pack=1,
        )  # fmt: skip


@triton.jit
def _eight_bits(sums, w, p01, p23):
    if _INTERPRETED:
        return _products(_products(sums, p01, w, 0, 8, 255), p23, w, 16, 24, 255)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a; dp2a.lo.s32.u32 a, $3, $2, $1; dp2a.hi.s32.u32 $0, $4, $2, a; }",
            "=r,r,r,r,r", [sums, w, p01, p23], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _eighths(sums, w, p01, p23):
    """Pairs of halves, compiled."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high; .reg .b32 a, b, t;
        mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 a, low; cvt.rn.f16x2.e4m3x2 b, high;
        fma.rn.f16x2 t, a, $3, $1; fma.rn.f16x2 $0, b, $4, t;
        }""",
        "=r,r,r,r,r", [sums, w, p01, p23], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _apart(pair):
    """Two halves as float32."""
    if _INTERPRETED:
        return (pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),
                (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32))  # fmt: skip
    else:
        a, b = tl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [pair], dtype=(tl.float16, tl.float16),
                                         is_pure=True, pack=1)  # fmt: skip
        return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def dots_of_four_bits(ws, evens, odds):
    """Four words (T, BN) times pairs of their places: sums of places 0 to 3 and 4 to 7, float32 that are too large by `EXTRA`.

    `evens` and `odds`: of each half, pairs (0, 2) and (1, 3) of the four words.
    """
    lower = tl.full(ws[0].shape, _EVEN_BITS, tl.int32)
    upper = tl.full(ws[0].shape, _EVEN_BITS, tl.int32)
    for i in tl.static_range(4):
        lower, upper = _four_bits(lower, upper, ws[i], evens[0][i][:, None], odds[0][i][:, None], evens[1][i][:, None],
                                  odds[1][i][:, None])  # fmt: skip
    return lower.to(tl.float32, bitcast=True), upper.to(tl.float32, bitcast=True)


@triton.jit
def dots_of_bytes(ws, p01, p23):
    """The same of all places, with nothing extra."""
    sums = tl.zeros(ws[0].shape, tl.int32)
    for i in tl.static_range(4):
        sums = _eight_bits(sums, ws[i], p01[i][:, None], p23[i][:, None])
    return sums.to(tl.float32)


@triton.jit
def dots_of_eighths(ws, p01, p23):
    """The same of e4m3, as two sums."""
    if _INTERPRETED:
        first = tl.zeros(ws[0].shape, tl.float32)
        second = tl.zeros(ws[0].shape, tl.float32)
        for i in tl.static_range(4):
            x0, x1 = _apart(p01[i][:, None])
            x2, x3 = _apart(p23[i][:, None])
            w0, w1 = values(ws[i], 0, None, _FP8, False, tl.float32)
            w2, w3 = values(ws[i], 2, None, _FP8, False, tl.float32)
            first += w0 * x0 + w2 * x2
            second += w1 * x1 + w3 * x3
        return first * _FP8_FACTOR, second * _FP8_FACTOR
    else:
        sums = tl.zeros(ws[0].shape, tl.int32)
        for i in tl.static_range(4):
            sums = _eighths(sums, ws[i], p01[i][:, None], p23[i][:, None])
        return _apart(sums)
