# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
"""One block of keys into the running softmax of attention: what decode and prefill share."""

from __future__ import annotations

import triton
import triton.language as tl

from tonle.models.cuda.fp8 import LARGEST, read_stretched
from tonle.models.inputs import LayerCache

_LOG2E = 1.4426950408889634


def score_scale(cache: LayerCache) -> float:
    """What products of queries and keys are multiplied with: head size, powers of two, and the stretch of eight bits."""
    scale: float = cache.k.shape[-1] ** -0.5 * _LOG2E
    return scale if cache.k_sizes is None else scale / LARGEST


@triton.jit
def weigh(q, k, scale, IEEE: tl.constexpr):
    """Scores (queries, keys) float32, in powers of two."""
    if IEEE:
        return tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    else:
        return tl.dot(q, tl.trans(k)) * scale


@triton.jit
def take_in(score, seen, v, v_size, best, total, acc, MASKED: tl.constexpr, IEEE: tl.constexpr):
    """Best score, sum of weights and weighted values, with these keys in. Not MASKED: `seen` is not looked at.

    `v_size` (keys,): what values are multiplied with, or None.
    """
    if MASKED:
        score = tl.where(seen, score, -1.0e30)
    top = tl.maximum(best, tl.max(score, 1))
    p = tl.exp2(score - top[:, None])
    if MASKED:
        p = tl.where(seen, p, 0.0)
    fade = tl.exp2(best - top)
    total = total * fade + tl.sum(p, 1)
    if v_size is not None:
        p = p * v_size[None, :]
    if IEEE:
        acc = tl.dot(p, v, acc * fade[:, None], input_precision="ieee")
    else:
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
    return top, total, acc


@triton.jit
def take_in_stretched(q, K, V, K_SIZES, V_SIZES, block, offset, inside, seen, best, total, acc, scale,
                      KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
                      IEEE: tl.constexpr):  # fmt: skip
    """The same with keys and values of eight bits, from (keys,) offsets in (keys,) blocks; only those `inside` are read."""
    place = (block * BLOCK + offset) * (KV_HEADS * D)
    k = read_stretched(K, place, inside, D).to(q.dtype)
    v = read_stretched(V, place, inside, D).to(q.dtype)
    size_place = block * (KV_HEADS * BLOCK) + offset
    k_size = tl.load(K_SIZES + size_place, mask=inside, other=0.0)
    v_size = tl.load(V_SIZES + size_place, mask=inside, other=0.0)
    score = weigh(q, k, scale, IEEE) * k_size[None, :]
    return take_in(score, seen, v, v_size, best, total, acc, MASKED, IEEE)
