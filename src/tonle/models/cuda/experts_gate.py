# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
"""What stands between an expert's two products, as kernels apply it: every gated activation that a description can name."""

from __future__ import annotations

import triton
import triton.language as tl

from tonle.models.cuda.activation import GATES, activated
from tonle.models.spec import SWIGLUOAI_ALPHA, Activation

EXPERT_GATES: dict[Activation, int] = {**GATES, "swigluoai": 5}  # their numbers in kernels
_SWIGLUOAI = tl.constexpr(EXPERT_GATES["swigluoai"])
_ALPHA = tl.constexpr(SWIGLUOAI_ALPHA)


@triton.jit
def gated(gate, up, GATE: tl.constexpr, CLAMP: tl.constexpr, DTYPE: tl.constexpr):
    """float32 -> float32. Rounded where separate torch operations would round; swigluoai, of many operations, at its ends."""
    gate = gate.to(DTYPE).to(tl.float32)
    up = up.to(DTYPE).to(tl.float32)
    if GATE == _SWIGLUOAI:
        gate = tl.minimum(gate, CLAMP)
        return gate * tl.sigmoid(gate * _ALPHA) * (tl.minimum(tl.maximum(up, -CLAMP), CLAMP) + 1.0)
    else:
        return activated(gate, GATE).to(DTYPE).to(tl.float32) * up
