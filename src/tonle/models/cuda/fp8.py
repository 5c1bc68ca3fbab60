# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
"""Keys and values in eight bits (e4m3), with a scale for each head of each token: how they are written and read.

GPUs from compute capability 8.9 on convert e4m3 themselves; there caches are of that type. On older ones caches are bytes
(uint8), and the same numbers are packed and unpacked by arithmetic on their bits.

Read back, numbers are not multiplied with their scales, and are float16, which holds every e4m3 number. Attention multiplies
scores with the keys' scales, and takes the values' into its weights (`softmax.py`). Scales are powers of two: to multiply with
them rounds nothing, and their logarithms and reciprocals are a subtraction each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tonle.models.cuda.gpu_features import INTERPRETED
from tonle.models.cuda.head_dims import in_heads

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _power(x):
    """The largest power of two that is not above (n,) float32 x: its bits without those after the first. 1 where x is tiny."""
    return tl.where(x > 1.0e-30, (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), 1.0)


@triton.jit
def exponent(scale):
    """log2 of powers of two (n,) float32."""
    return ((scale.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.float32)


@triton.jit
def reciprocal(scale):
    """1 / powers of two (n,) float32."""
    return (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _bytes_of(x):
    """float32, none above 448 -> the bits of the nearest e4m3 numbers, uint8; to the even one where two are as near."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    usual = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (
        120 << 3
    )  # three bits after the point; the exponent's bias is 7
    tiny = (tl.abs(x) + 16384.0).to(
        tl.int32, bitcast=True
    ) - 0x46800000  # multiples of 2**-9: so float32 rounds at 2**14
    return (tl.where(size < 0x3C800000, tiny, usual) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def numbers_of(x):
    """float32 of e4m3 numbers, of their bits, or of any floats.

    Their bits in the places of a float16's are the number times 2**-8: there the exponent's bias is 15.
    """
    if x.dtype == tl.uint8:
        wide = x.to(tl.uint16)
        half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return half.to(tl.float32) * 256.0
    else:
        return x.to(tl.float32)


@triton.jit
def packed(x, TYPE: tl.constexpr):
    """x (heads, D) -> (heads, D) e4m3, as TYPE says, and scales (heads,) float32, powers of two: their product is x.

    The largest number of a head becomes 128 to 256; e4m3 ends at 448, so no rounding leads beyond its end.
    """
    x = x.to(tl.float32)
    scale = _power(tl.max(tl.abs(x), 1)) * (1.0 / 128)
    x = x * reciprocal(scale)[:, None]
    if TYPE == tl.uint8:  # noqa: SIM300
        return _bytes_of(x), scale
    else:
        return x.to(TYPE), scale


@triton.jit
def _halves(x, TYPE: tl.constexpr):
    """(n, m) int32, four e4m3 numbers each -> (n, 4 m) float16.

    Two conversions of two numbers, and what threads hold is not moved. Triton's own conversion takes bytes, and spends more
    on getting them into registers one by one than on all the rest of attention.
    """
    if TYPE == tl.uint8:  # noqa: SIM300  # as `numbers_of`, two numbers at a time
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 pair, sign, first, second, factor;
            mov.b32 factor, 0x5C005C00;
            prmt.b32 pair, $4, 0, 0x1404;
            and.b32 sign, pair, 0x80008000;
            and.b32 pair, pair, 0x7F007F00;
            shr.u32 pair, pair, 1;
            or.b32 pair, pair, sign;
            mul.f16x2 first, pair, factor;
            prmt.b32 pair, $4, 0, 0x3424;
            and.b32 sign, pair, 0x80008000;
            and.b32 pair, pair, 0x7F007F00;
            shr.u32 pair, pair, 1;
            or.b32 pair, pair, sign;
            mul.f16x2 second, pair, factor;
            mov.b32 {$0, $1}, first;
            mov.b32 {$2, $3}, second;
            }""",
            "=h,=h,=h,=h,r",
            [x],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high; .reg .b32 first, second;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 first, low;
            cvt.rn.f16x2.e4m3x2 second, high;
            mov.b32 {$0, $1}, first;
            mov.b32 {$2, $3}, second;
            }""",
            "=h,=h,=h,=h,r",
            [x],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    halves = tl.join(tl.join(a, c), tl.join(b, d))  # (n, m, 2, 2)
    return tl.reshape(halves, (x.shape[0], 4 * x.shape[1]))


@triton.jit
def read_packed(CACHE, place, inside, D: tl.constexpr, P: tl.constexpr):
    """float16 (n, P) of e4m3 numbers from (n,) `place` on, which are multiples of D; 0 where not `inside`, and past D."""
    if _INTERPRETED:  # it knows no assembly
        at = CACHE + place[:, None] + tl.arange(0, P)[None, :]
        if CACHE.dtype.element_ty == tl.uint8:
            numbers = tl.load(at, mask=in_heads(inside, D, P), other=0)
        else:
            numbers = tl.load(at, mask=in_heads(inside, D, P), other=0.0)
        return numbers_of(numbers).to(tl.float16)
    else:
        at = CACHE.to(tl.pointer_type(tl.int32)) + (place // 4)[:, None] + tl.arange(0, P // 4)[None, :]
        return _halves(tl.load(at, mask=in_heads(inside, D // 4, P // 4), other=0), CACHE.dtype.element_ty)


@triton.jit
def halved(q, scale):
    """q (queries, D) as float16, none above 2, and what its scores are multiplied with to make up for it: (queries, 1).

    As they are, queries of bfloat16 may lie beyond float16.
    """
    q = q.to(tl.float32)
    power = _power(tl.max(tl.abs(q), 1))
    return (q * reciprocal(power)[:, None]).to(tl.float16), (power * scale)[:, None]
