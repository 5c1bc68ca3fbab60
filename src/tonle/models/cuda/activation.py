# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
"""Activations of gated mixers, as kernels apply them. Does not: multiply with up, or round; kernels do where torch would."""

from __future__ import annotations

import triton
import triton.language as tl

from tonle.models.spec import Activation

# Their numbers in kernels, where 0 stands for a product that is not gated.
GATES: dict[Activation, int] = {"silu": 1, "gelu_tanh": 2, "gelu": 3, "relu2": 4}


def gate_of(activation: Activation, *, glu: bool = True) -> int:
    """What a kernel takes as GLU."""
    return GATES[activation] if glu else 0


@triton.jit
def activated(x, GLU: tl.constexpr):
    """float32 -> float32."""
    if GLU == 1:
        return x * tl.sigmoid(x)
    elif GLU == 2:  # x / 2 * (1 + tanh(z)) is x * sigmoid(2 z)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif GLU == 3:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        above = tl.maximum(x, 0.0)
        return above * above
