# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
"""One block of keys into the running softmax of attention: what decode and prefill share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weigh(q, k, scale, IEEE: tl.constexpr):
    """Scores (queries, keys) float32, in powers of two."""
    if IEEE:
        return tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    else:
        return tl.dot(q, tl.trans(k)) * scale


@triton.jit
def take_in(score, seen, v, best, total, acc, MASKED: tl.constexpr, IEEE: tl.constexpr):
    """Best score, sum of weights and weighted values, with these keys in. Not MASKED: `seen` is not looked at."""
    if MASKED:
        score = tl.where(seen, score, -1.0e30)
    top = tl.maximum(best, tl.max(score, 1))
    p = tl.exp2(score - top[:, None])
    if MASKED:
        p = tl.where(seen, p, 0.0)
    fade = tl.exp2(best - top)
    total = total * fade + tl.sum(p, 1)
    if IEEE:
        acc = tl.dot(p, v, acc * fade[:, None], input_precision="ieee")
    else:
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
    return top, total, acc
