# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,assignment,var-annotated"
"""Words of few-bit numbers as operands of tensor cores: bfloat16 or float16, two words and so two numbers at a time.

`few_bits.py` says how bits become floats. Here what was added is taken off again, so numbers are exact: integers of 4 and 8 bits,
e4m3, and a table's numbers rounded to the operand's type.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tonle.models.cuda.few_bits import FP8_FACTOR, offset, values
from tonle.models.cuda.gpu_features import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)
_FACTOR = tl.constexpr(FP8_FACTOR)


@triton.jit
def _int4_bf16(w):
    """128 + n and 16 + n, less 136 and 24."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 l, h, t, one, a, b;
        mov.b32 one, 0x3F803F80; mov.b32 a, 0xC308C308; mov.b32 b, 0xC1C0C1C0;
        prmt.b32 l, $8, $9, 0x5410; prmt.b32 h, $8, $9, 0x7632;
        lop3.b32 t, l, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $0, t, one, a;
        shr.b32 t, l, 1; lop3.b32 t, t, 0x00780078, 0x41804180, 0xEA; fma.rn.bf16x2 $1, t, one, b;
        shr.b32 t, l, 8; lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $2, t, one, a;
        shr.b32 t, l, 9; lop3.b32 t, t, 0x00780078, 0x41804180, 0xEA; fma.rn.bf16x2 $3, t, one, b;
        lop3.b32 t, h, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $4, t, one, a;
        shr.b32 t, h, 1; lop3.b32 t, t, 0x00780078, 0x41804180, 0xEA; fma.rn.bf16x2 $5, t, one, b;
        shr.b32 t, h, 8; lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $6, t, one, a;
        shr.b32 t, h, 9; lop3.b32 t, t, 0x00780078, 0x41804180, 0xEA; fma.rn.bf16x2 $7, t, one, b;
        }""",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
        [w],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _int4_f16(w):
    """1024 + n and 64 + n, less 1032 and 72."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 l, h, t, a, b;
        mov.b32 a, 0xE408E408; mov.b32 b, 0xD480D480;
        prmt.b32 l, $8, $9, 0x5410; prmt.b32 h, $8, $9, 0x7632;
        lop3.b32 t, l, 0x000F000F, 0x64006400, 0xEA; add.rn.f16x2 $0, t, a;
        lop3.b32 t, l, 0x00F000F0, 0x54005400, 0xEA; add.rn.f16x2 $1, t, b;
        shr.b32 l, l, 8;
        lop3.b32 t, l, 0x000F000F, 0x64006400, 0xEA; add.rn.f16x2 $2, t, a;
        lop3.b32 t, l, 0x00F000F0, 0x54005400, 0xEA; add.rn.f16x2 $3, t, b;
        lop3.b32 t, h, 0x000F000F, 0x64006400, 0xEA; add.rn.f16x2 $4, t, a;
        lop3.b32 t, h, 0x00F000F0, 0x54005400, 0xEA; add.rn.f16x2 $5, t, b;
        shr.b32 h, h, 8;
        lop3.b32 t, h, 0x000F000F, 0x64006400, 0xEA; add.rn.f16x2 $6, t, a;
        lop3.b32 t, h, 0x00F000F0, 0x54005400, 0xEA; add.rn.f16x2 $7, t, b;
        }""",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
        [w],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _int8_bf16(w):
    """A mantissa has room for seven bits: 128 + those, less 128 where the eighth is set and 256 where it is not."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 h, a, c, minus;
        mov.b32 minus, 0xBF80BF80;
        prmt.b32 h, $4, $5, 0x4400; lop3.b32 a, h, 0x007F007F, 0x43004300, 0xEA; lop3.b32 c, h, 0x00800080, 0x43004300, 0xAE;
        fma.rn.bf16x2 $0, c, minus, a;
        prmt.b32 h, $4, $5, 0x5511; lop3.b32 a, h, 0x007F007F, 0x43004300, 0xEA; lop3.b32 c, h, 0x00800080, 0x43004300, 0xAE;
        fma.rn.bf16x2 $1, c, minus, a;
        prmt.b32 h, $4, $5, 0x6622; lop3.b32 a, h, 0x007F007F, 0x43004300, 0xEA; lop3.b32 c, h, 0x00800080, 0x43004300, 0xAE;
        fma.rn.bf16x2 $2, c, minus, a;
        prmt.b32 h, $4, $5, 0x7733; lop3.b32 a, h, 0x007F007F, 0x43004300, 0xEA; lop3.b32 c, h, 0x00800080, 0x43004300, 0xAE;
        fma.rn.bf16x2 $3, c, minus, a;
        }""",
        "=&r,=&r,=&r,=&r,r,r",
        [w],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _int8_f16(w):
    """1024 + n, less 1152."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 h, a;
        mov.b32 a, 0xE480E480;
        prmt.b32 h, $4, $5, 0x4400; lop3.b32 h, h, 0x00FF00FF, 0x64006400, 0xEA; add.rn.f16x2 $0, h, a;
        prmt.b32 h, $4, $5, 0x5511; lop3.b32 h, h, 0x00FF00FF, 0x64006400, 0xEA; add.rn.f16x2 $1, h, a;
        prmt.b32 h, $4, $5, 0x6622; lop3.b32 h, h, 0x00FF00FF, 0x64006400, 0xEA; add.rn.f16x2 $2, h, a;
        prmt.b32 h, $4, $5, 0x7733; lop3.b32 h, h, 0x00FF00FF, 0x64006400, 0xEA; add.rn.f16x2 $3, h, a;
        }""",
        "=&r,=&r,=&r,=&r,r,r",
        [w],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _fp8_bf16(w):
    """Sign, exponent and mantissa at their places in a bfloat16, times 2 ** 120."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 h, t, up, zero;
        mov.b32 up, 0x7B807B80; mov.b32 zero, 0x80008000;
        prmt.b32 h, $4, $5, 0x4400; shr.b32 t, h, 4; and.b32 t, t, 0x07F007F0; lop3.b32 t, h, 0x80008000, t, 0xEA;
        fma.rn.bf16x2 $0, t, up, zero;
        prmt.b32 h, $4, $5, 0x5511; shr.b32 t, h, 4; and.b32 t, t, 0x07F007F0; lop3.b32 t, h, 0x80008000, t, 0xEA;
        fma.rn.bf16x2 $1, t, up, zero;
        prmt.b32 h, $4, $5, 0x6622; shr.b32 t, h, 4; and.b32 t, t, 0x07F007F0; lop3.b32 t, h, 0x80008000, t, 0xEA;
        fma.rn.bf16x2 $2, t, up, zero;
        prmt.b32 h, $4, $5, 0x7733; shr.b32 t, h, 4; and.b32 t, t, 0x07F007F0; lop3.b32 t, h, 0x80008000, t, 0xEA;
        fma.rn.bf16x2 $3, t, up, zero;
        }""",
        "=&r,=&r,=&r,=&r,r,r",
        [w],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _fp8_f16(w):
    """The same in a float16, times 2 ** 8."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 h, t, up;
        mov.b32 up, 0x5C005C00;
        prmt.b32 h, $4, $5, 0x4400; shr.b32 t, h, 1; and.b32 t, t, 0x3F803F80; lop3.b32 t, h, 0x80008000, t, 0xEA;
        mul.rn.f16x2 $0, t, up;
        prmt.b32 h, $4, $5, 0x5511; shr.b32 t, h, 1; and.b32 t, t, 0x3F803F80; lop3.b32 t, h, 0x80008000, t, 0xEA;
        mul.rn.f16x2 $1, t, up;
        prmt.b32 h, $4, $5, 0x6622; shr.b32 t, h, 1; and.b32 t, t, 0x3F803F80; lop3.b32 t, h, 0x80008000, t, 0xEA;
        mul.rn.f16x2 $2, t, up;
        prmt.b32 h, $4, $5, 0x7733; shr.b32 t, h, 1; and.b32 t, t, 0x3F803F80; lop3.b32 t, h, 0x80008000, t, 0xEA;
        mul.rn.f16x2 $3, t, up;
        }""",
        "=&r,=&r,=&r,=&r,r,r",
        [w],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def pairs(w, T, FORM: tl.constexpr, DTYPE: tl.constexpr):
    """The numbers of words `w` (int32), place by place, as DTYPE."""
    if _INTERPRETED or FORM == 3 or DTYPE == tl.float32:  # noqa: SIM300
        STEP: tl.constexpr = 4 if FORM == 3 else 2
        numbers = ()
        for p in tl.static_range(4 if FORM == 1 or FORM == 2 else 8):
            if p % STEP == 0:
                some = values(w, p, T, FORM, False, DTYPE)
            if FORM == 2:
                numbers += ((some[p % STEP] * _FACTOR).to(DTYPE),)
            else:
                numbers += ((some[p % STEP] - offset(p, FORM)).to(DTYPE),)
        return numbers
    elif FORM == 0:
        return _int4_bf16(w) if DTYPE == tl.bfloat16 else _int4_f16(w)  # noqa: SIM300
    elif FORM == 1:
        return _int8_bf16(w) if DTYPE == tl.bfloat16 else _int8_f16(w)  # noqa: SIM300
    else:
        return _fp8_bf16(w) if DTYPE == tl.bfloat16 else _fp8_f16(w)  # noqa: SIM300
