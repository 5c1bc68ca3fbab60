"""exp in vector code, and what is made of it; see `vector.py` for the manner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tonle.models.cpu.products import compiled
from tonle.models.cpu.vector import HALF, I64, LANES, VF, VI, Code, each, larger
from tonle.models.spec import SWIGLUOAI_ALPHA

_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def _every(value: float) -> Any:
    return ir.Constant(VF, [value] * LANES)


def exponential(code: Code, x: Any) -> Any:
    """exp of every lane, to float32 precision; x at most about 88, and below -87 as at -87.

    exp(x) = 2**n * exp(r) with n = round(x / ln 2); 2**n is built in the exponent's bits.
    """
    b = code.b
    x = larger(code, x, _every(-87.0))
    n = each(code, "rint", b.fmul(x, _every(1.44269504)))
    r = code.fma(n, _every(-0.693359375), x)
    r = code.fma(n, _every(2.12194440e-4), r)
    p = _every(_POLYNOMIAL[0])
    for factor in _POLYNOMIAL[1:]:
        p = code.fma(p, r, _every(factor))
    p = b.fadd(code.fma(p, b.fmul(r, r), r), _every(1.0))
    bits = b.shl(b.add(b.fptosi(n, VI), ir.Constant(VI, [127] * LANES)), ir.Constant(VI, [23] * LANES))
    return b.fmul(p, b.bitcast(bits, VF))


def _sigmoid(code: Code, x: Any) -> Any:
    decay = exponential(code, code.b.fneg(larger(code, x, _every(-80.0))))
    return code.b.fdiv(_every(1.0), code.b.fadd(decay, _every(1.0)))


def _silu(code: Code, x: Any) -> Any:
    decay = exponential(code, code.b.fneg(larger(code, x, _every(-80.0))))
    return code.b.fdiv(x, code.b.fadd(decay, _every(1.0)))


def _gelu_tanh(code: Code, x: Any) -> Any:
    """x / 2 * (1 + tanh(z)) is x * sigmoid(2 z)."""
    b = code.b
    cube = b.fmul(b.fmul(x, x), x)
    return b.fmul(x, _sigmoid(code, b.fmul(code.fma(cube, _every(0.044715), x), _every(1.5957691216057308))))


def _relu2(code: Code, x: Any) -> Any:
    above = larger(code, x, _every(0.0))
    return code.b.fmul(above, above)


def _gate(activation: Callable[[Code, Any], Any]) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def gate(typingctx: Any, total: Any, t: Any) -> Any:
        """Of a block's row (gate's HALF numbers, then up's): the first half becomes activation(gate) * up."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code = Code(context, builder, signature, args)
            numbers = code.pointer(0)
            for first in range(0, HALF, LANES):
                gate = code.load(numbers, ir.Constant(I64, first), VF)
                up = code.load(numbers, ir.Constant(I64, HALF + first), VF)
                code.store(builder.fmul(activation(code, gate), up), numbers, ir.Constant(I64, first))
            return context.get_dummy_value()

        return types.void(total, t), generate

    return gate


@intrinsic  # type: ignore[untyped-decorator]
def _gate_swigluoai(typingctx: Any, total: Any, t: Any, clamp: Any) -> Any:
    """Likewise, with (up + 1) * gate * sigmoid(1.702 * gate); gate is kept below `clamp`, up within it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args)
        numbers, top = code.pointer(0), code.spread(code.number(2))
        for first in range(0, HALF, LANES):
            gate = _smaller(code, code.load(numbers, ir.Constant(I64, first), VF), top)
            up = _smaller(code, code.load(numbers, ir.Constant(I64, HALF + first), VF), top)
            up = larger(code, up, builder.fneg(top))
            share = builder.fmul(gate, _sigmoid(code, builder.fmul(gate, _every(SWIGLUOAI_ALPHA))))
            code.store(code.fma(up, share, share), numbers, ir.Constant(I64, first))
        return context.get_dummy_value()

    return types.void(total, t, clamp), generate


def _smaller(code: Code, one: Any, other: Any) -> Any:
    return code.b.select(code.b.fcmp_ordered("<", one, other), one, other)


ACTIVATIONS = (
    "silu",
    "gelu_tanh",
    "relu2",
    "swigluoai",
)  # those there are kernels for; their numbers are those of `gate_group`
_gate_silu, _gate_gelu_tanh, _gate_relu2 = _gate(_silu), _gate(_gelu_tanh), _gate(_relu2)


@compiled
def gate_group(total: Any, t: Any, activation: Any, clamp: Any) -> None:
    """total, taken as flat memory, from t on: a block's row; see above. clamp: float32, of swigluoai."""
    if activation == 0:
        _gate_silu(total, t)
    elif activation == 1:
        _gate_gelu_tanh(total, t)
    elif activation == 2:
        _gate_relu2(total, t)
    else:
        _gate_swigluoai(total, t, clamp)
