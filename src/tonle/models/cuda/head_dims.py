# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
"""Heads of any size in kernels, which count in powers of two: D numbers of a head, P the power of two that holds them.

Where P is D, nothing is masked: the code is that of kernels which know no other sizes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def in_heads(some, D: tl.constexpr, P: tl.constexpr):
    """From (n,) which heads there are to a mask for (n, P) numbers."""
    if P == D:
        return some[:, None]
    else:
        return some[:, None] & (tl.arange(0, P) < D)[None, :]


@triton.jit
def load_head(HEAD, place, D: tl.constexpr, P: tl.constexpr):
    """Numbers of one head at (P,) places; zeros past its end."""
    if P == D:
        return tl.load(HEAD + place)
    else:
        return tl.load(HEAD + place, mask=tl.arange(0, P) < D, other=0.0)


@triton.jit
def store_head(HEAD, x, D: tl.constexpr, P: tl.constexpr):
    """x (1, P)."""
    d = tl.arange(0, P)[None, :]
    if P == D:
        tl.store(HEAD + d, x)
    else:
        tl.store(HEAD + d, x, mask=d < D)


@triton.jit
def partners(P: tl.constexpr, R: tl.constexpr):
    """(P,) which dimension each of a head's turns with: the first R are rotated, the others turn with themselves."""
    d = tl.arange(0, P)
    if R == P:
        return (d + R // 2) % R
    else:
        return tl.where(d < R, (d + R // 2) % R, d)
