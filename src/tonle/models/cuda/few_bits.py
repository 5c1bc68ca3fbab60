# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,assignment,var-annotated"
"""Words of few-bit numbers (`models/packed.py`) to floats, in registers: for one row as float32, for tensor cores in pairs.

No conversion instruction takes four bits, and those from integers run at a quarter of the rate. So bits are put into the mantissa
of a float whose exponent makes their last one worth 1: the number plus a power of two. `values` leaves it there: a product with x
is off by that power times the sum of x, which is the same for all outputs, so one row's kernel takes it off once (`offset`).
`few_bit_pairs.py` subtracts it, exactly, two numbers at a time. e4m3 has its bits in the order of any float: at the place where
float16 or bfloat16 has them, they are right but for a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tonle.models.cuda.gpu_features import INTERPRETED
from tonle.models.packed import Packed

INT4, INT8, FP8, TABLE = 0, 1, 2, 3
FORMS = {"int4": INT4, "int8": INT8, "fp8": FP8, "table": TABLE}
_INTERPRETED = tl.constexpr(INTERPRETED)
_INT4, _INT8, _FP8, _TABLE = tl.constexpr(INT4), tl.constexpr(INT8), tl.constexpr(FP8), tl.constexpr(TABLE)
# Numbers that `values` gives at once, by form.
AT_ONCE = (2, 2, 2, 4)
FP8_FACTOR = 256.0  # `values` of e4m3 are so much too small where there is no instruction for them


def table_words(packed: Packed, dtype: torch.dtype) -> torch.Tensor | None:
    """The 16 numbers of a table as kernels take them: upper bytes in four words, then lower ones; float32 as they are."""
    if packed.table is None:
        return None
    if dtype == torch.float32:
        return packed.table
    halves = packed.table.to(dtype).view(torch.uint8).view(16, 2)
    return torch.cat((halves[:, 1], halves[:, 0])).contiguous().view(torch.int32)


@triton.jit
def offset(p: tl.constexpr, FORM: tl.constexpr):
    """What is to be taken off number p of `values`, with the form's own zero."""
    if FORM == _INT4:
        return tl.constexpr(2048.0 + 8.0) if p == 1 or p == 3 or p == 5 else tl.constexpr(128.0 + 8.0)
    elif FORM == _INT8:
        return tl.constexpr(32768.0 + 128.0)
    else:
        return tl.constexpr(0.0)


@triton.jit
def _nibbles(w, p: tl.constexpr):
    """Numbers p and p + 1 of four bits, each below those of 128 or of 2048: 128 + n, 2048 + n."""
    if _INTERPRETED:
        found = ()
        for q in tl.static_range(p, p + 2):
            n = (w >> (4 * q)) & 15
            if q == 1 or q == 3 or q == 5:
                found += (((n << 12) | 0x45000000).to(tl.float32, bitcast=True),)
            else:
                found += (((n << 16) | 0x43000000).to(tl.float32, bitcast=True),)
        return found
    elif p == 0:
        return _two(
            """{ .reg .b32 t, u; shl.b32 t, $2, 16; lop3.b32 $0, t, 0x000F0000, 0x43000000, 0xEA;
            shl.b32 u, $2, 8; lop3.b32 $1, u, 0x0000F000, 0x45000000, 0xEA; }""", w)  # fmt: skip
    elif p == 2:
        return _two(
            """{ .reg .b32 t; shl.b32 t, $2, 8; lop3.b32 $0, t, 0x000F0000, 0x43000000, 0xEA;
            lop3.b32 $1, $2, 0x0000F000, 0x45000000, 0xEA; }""", w)  # fmt: skip
    elif p == 4:
        return _two(
            """{ .reg .b32 t; lop3.b32 $0, $2, 0x000F0000, 0x43000000, 0xEA;
            shr.b32 t, $2, 8; lop3.b32 $1, t, 0x0000F000, 0x45000000, 0xEA; }""", w)  # fmt: skip
    else:
        return _two(
            """{ .reg .b32 t, u; shr.b32 t, $2, 8; lop3.b32 $0, t, 0x000F0000, 0x43000000, 0xEA;
            shr.b32 u, $2, 12; lop3.b32 $1, u, 0x000F0000, 0x43000000, 0xEA; }""", w)  # fmt: skip


@triton.jit
def _two(ASSEMBLY: tl.constexpr, w):
    """Two float32 by their bits."""
    return tl.inline_asm_elementwise(ASSEMBLY, "=&r,=&r,r", [w], dtype=(tl.float32, tl.float32), is_pure=True, pack=1)


@triton.jit
def _bytes(w, p: tl.constexpr):
    """Bytes p and p + 1 below the bits of 32768: 32768 + n."""
    if _INTERPRETED:
        found = ()
        for q in tl.static_range(p, p + 2):
            found += (((((w >> (8 * q)) & 0xFF) << 8) | 0x47000000).to(tl.float32, bitcast=True),)
        return found
    elif p == 0:
        return _two("prmt.b32 $0, $2, 0x47000000, 0x7404; prmt.b32 $1, $2, 0x47000000, 0x7414;", w)
    else:
        return _two("prmt.b32 $0, $2, 0x47000000, 0x7424; prmt.b32 $1, $2, 0x47000000, 0x7434;", w)


@triton.jit
def _half(bits):
    """The lower 16 bits of a word, a float16."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _eighths(w, p: tl.constexpr, NATIVE: tl.constexpr):
    """e4m3 numbers p and p + 1, too small by 256 unless NATIVE."""
    if NATIVE:
        a, b = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; .reg .b32 t; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 t, "
            + ("low" if p == 0 else "high")
            + "; mov.b32 {$0, $1}, t; }",
            "=h,=h,r",
            [w],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
        return a.to(tl.float32), b.to(tl.float32)
    else:
        even = w << 8
        even = ((even >> 1) & 0x3F803F80) | (even & -0x7FFF8000)
        odd = ((w >> 1) & 0x3F803F80) | (w & -0x7FFF8000)
        if p == 0:
            return _half(even), _half(odd)
        else:
            return _half(even >> 16), _half(odd >> 16)


# Four places at a time: their lower three bits choose a byte of either half of the table, their fourth the half.
_LOOK_UP = tl.constexpr("""{
    .reg .b32 s, k, x, y, upper, lower;
    and.b32 s, $4, 0x7777; shr.b32 k, $4, 1; lop3.b32 k, k, 0x4444, 0x3210, 0xEA;
    prmt.b32 x, $5, $6, s; prmt.b32 y, $7, $8, s; prmt.b32 upper, x, y, k;
    prmt.b32 x, $9, $10, s; prmt.b32 y, $11, $12, s; prmt.b32 lower, x, y, k;
    prmt.b32 x, lower, upper, 0x5140; prmt.b32 y, lower, upper, 0x7362;
    mov.b32 {$0, $1}, x; mov.b32 {$2, $3}, y;
    }""")
_LOOK_UP_OPERANDS = tl.constexpr("=h,=h,=h,=h,r,r,r,r,r,r,r,r,r")


@triton.jit
def _looked_up(w, p: tl.constexpr, T, DTYPE: tl.constexpr):
    """Numbers p to p + 3 of a table, T of `table_words`."""
    if _INTERPRETED:
        found = ()
        for q in tl.static_range(p, p + 4):
            found += (tl.load(T + ((w >> (4 * q)) & 15)).to(tl.float32),)
        return found
    elif DTYPE == tl.bfloat16:  # noqa: SIM300
        a, b, c, d = tl.inline_asm_elementwise(
            _LOOK_UP, _LOOK_UP_OPERANDS,
            [w >> (4 * p), tl.load(T), tl.load(T + 1), tl.load(T + 2), tl.load(T + 3), tl.load(T + 4), tl.load(T + 5),
             tl.load(T + 6), tl.load(T + 7)],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
        )  # fmt: skip
        return a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            _LOOK_UP, _LOOK_UP_OPERANDS,
            [w >> (4 * p), tl.load(T), tl.load(T + 1), tl.load(T + 2), tl.load(T + 3), tl.load(T + 4), tl.load(T + 5),
             tl.load(T + 6), tl.load(T + 7)],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=1,
        )  # fmt: skip
        return a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)


@triton.jit
def values(w, p: tl.constexpr, T, FORM: tl.constexpr, NATIVE: tl.constexpr, DTYPE: tl.constexpr):
    """Numbers from place p on, AT_ONCE, of words `w` (int32, any shape) as float32, `offset` still in them.

    A few at a time, so that they are used before there are more: all of them would not fit into registers.
    """
    if FORM == _INT4:
        return _nibbles(w, p)
    elif FORM == _INT8:
        return _bytes(w, p)
    elif FORM == _FP8:
        return _eighths(w, p, NATIVE)
    else:
        return _looked_up(w, p, T, DTYPE)
