# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
"""Keys and values in eight bits (e4m3): each head of each token is stretched so that its largest number is `LARGEST`.

How large that number was, its size, is kept beside it. Read back, numbers stay stretched and in float16, which holds every
e4m3 number: scores are multiplied with the keys' sizes, weights with the values', and results are divided by `LARGEST` once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tonle.models.cuda.dependent import INTERPRETED

LARGEST = 256.0  # what the largest number of a head becomes; e4m3 ends at 448, so no rounding leads beyond its end
_LARGEST = tl.constexpr(LARGEST)
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def stretched(x):
    """x (heads, D) -> (heads, D) e4m3, and sizes (heads,) float32."""
    x = x.to(tl.float32)
    size = tl.max(tl.abs(x), 1)
    stretch = 1.0 / tl.where(size > 0, size, 1.0) * _LARGEST
    return (x * stretch[:, None]).to(tl.float8e4nv), size


@triton.jit
def _halves(x):
    """(n, m) int32, four e4m3 numbers each -> (n, 4 m) float16.

    Two conversions of two numbers, and what threads hold is not moved. Triton's own conversion takes bytes, and spends more
    on getting them into registers one by one than on all the rest of attention.
    """
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
def read_stretched(CACHE, place, inside, D: tl.constexpr):
    """float16 (n, D) of e4m3 numbers from (n,) `place` on, which are multiples of D; 0 where not `inside`."""
    if _INTERPRETED:  # it knows no assembly
        at = CACHE + place[:, None] + tl.arange(0, D)[None, :]
        return tl.load(at, mask=inside[:, None], other=0.0).to(tl.float16)
    else:
        at = CACHE.to(tl.pointer_type(tl.int32)) + (place // 4)[:, None] + tl.arange(0, D // 4)[None, :]
        return _halves(tl.load(at, mask=inside[:, None], other=0))
