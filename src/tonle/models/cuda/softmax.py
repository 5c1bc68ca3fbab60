# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
"""One block of keys into the running softmax of attention, soft caps and sinks: what decode and prefill share."""

from __future__ import annotations

import triton
import triton.language as tl

from tonle.models.cuda.fp8 import exponent, read_packed, reciprocal

LOG2E = 1.4426950408889634  # scores are in powers of two
_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def weigh(q, k, scale, IEEE: tl.constexpr):
    """Scores (queries, keys) float32, in powers of two. `scale`: one number, or one per query (queries, 1)."""
    if IEEE:
        return tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    else:
        return tl.dot(q, tl.trans(k)) * scale


@triton.jit
def capped(score, CAP: tl.constexpr):
    """Scores in powers of two, kept within CAP: cap * tanh(score / cap). 0: as they are.

    As 1 - 2 / (e**2x + 1), which is right at both ends (e**2x may be 0 or infinite) and off by at most some 1e-7 of CAP.
    The device's own tanh is one instruction, but off by 5e-4 of CAP: for a CAP of 50 that is 2 % of a weight.
    """
    if CAP > 0:
        e = tl.exp2(score * (2.0 / CAP))  # of x = score / (LOG2E * CAP)
        return CAP * _LOG2E - 2.0 * CAP * _LOG2E / (e + 1.0)
    else:
        return score


@triton.jit
def sinks_of(SINKS, head, some):
    """The sinks of (heads,) `head`, in powers of two."""
    return tl.load(SINKS + head, mask=some, other=-1.0e30).to(tl.float32) * _LOG2E


@triton.jit
def with_sink(total, best, sink):
    """The sum of weights, with the sink's, if there is one: once per query, when all keys are in.

    Not before: what keys weigh would be measured by the sink, and little is left of small weights in half precision.
    """
    if sink is not None:
        return total + tl.exp2(sink - best)
    else:
        return total


@triton.jit
def take_in(score, seen, v, v_scale, best, total, acc, MASKED: tl.constexpr, IEEE: tl.constexpr):
    """Best score, sum of weights and weighted values, with these keys in. Not MASKED: `seen` is not looked at.

    `v_scale` (keys,): what values are yet to be multiplied with, powers of two, or None. It becomes part of the score, so that
    weights times scales are at most 1 and fit into half precision however large or small values are; the sum takes it out again.
    """
    if v_scale is not None:
        score = score + exponent(v_scale)[None, :]
    if MASKED:
        score = tl.where(seen, score, -1.0e30)
    top = tl.maximum(best, tl.max(score, 1))
    p = tl.exp2(score - top[:, None])
    if MASKED:
        p = tl.where(seen, p, 0.0)
    fade = tl.exp2(best - top)
    if v_scale is not None:
        total = total * fade + tl.sum(p * reciprocal(v_scale)[None, :], 1)
    else:
        total = total * fade + tl.sum(p, 1)
    if IEEE:
        acc = tl.dot(p, v, acc * fade[:, None], input_precision="ieee")
    else:
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
    return top, total, acc


@triton.jit
def take_in_packed(q, K, V, K_SCALES, V_SCALES, block, offset, inside, seen, best, total, acc, scale,
                   KV_HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, CAP: tl.constexpr,
                   MASKED: tl.constexpr, IEEE: tl.constexpr):  # fmt: skip
    """The same with keys and values of eight bits, from (keys,) offsets in (keys,) blocks; only those `inside` are read."""
    place = (block * BLOCK + offset) * (KV_HEADS * D)
    k = read_packed(K, place, inside, D, P).to(q.dtype)
    v = read_packed(V, place, inside, D, P).to(q.dtype)
    scale_place = block * (KV_HEADS * BLOCK) + offset
    k_scale = tl.load(K_SCALES + scale_place, mask=inside, other=1.0)
    v_scale = tl.load(V_SCALES + scale_place, mask=inside, other=1.0)
    score = capped(weigh(q, k, scale, IEEE) * k_scale[None, :], CAP)
    return take_in(score, seen, v, v_scale, best, total, acc, MASKED, IEEE)
