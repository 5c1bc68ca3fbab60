# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
"""Queries and keys of a mixed step: norm per head, rotation, and keys and values into the cache.

A pure decode step does the same inside its attention kernel. `turned` is shared by both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tonle.models.cuda.batch import StepBuffer
from tonle.models.cuda.dependent import follow
from tonle.models.cuda.fp8 import packed
from tonle.models.cuda.launch import launch
from tonle.models.inputs import LayerCache
from tonle.models.rope import Rotary


def angle_table(rotary: Rotary, num_positions: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(positions, 2, head_dim): cos, and sin with its first half negated, as `rope.rotate` wants them."""
    cos, sin = rotary.angles(torch.arange(num_positions, device=device), dtype)
    return torch.stack((cos.squeeze(1), sin.squeeze(1)), dim=1).contiguous()


@triton.jit
def turned(HEADS, head, some, position, GAIN, ANGLES, eps, D: tl.constexpr, NORM: tl.constexpr):
    """(heads, D) float32 heads of one token, normed if asked for and rotated; rounded where torch would round."""
    d = tl.arange(0, D)
    other = (d + D // 2) % D  # the dimension each one turns with
    base = HEADS + head[:, None] * D
    x = tl.load(base + d[None, :], mask=some[:, None], other=0.0)
    y = tl.load(base + other[None, :], mask=some[:, None], other=0.0)
    dtype: tl.constexpr = x.dtype
    x = x.to(tl.float32)
    y = y.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = (x * scale * tl.load(GAIN + d).to(tl.float32)[None, :]).to(dtype).to(tl.float32)
        y = (y * scale * tl.load(GAIN + other).to(tl.float32)[None, :]).to(dtype).to(tl.float32)
    cos = tl.load(ANGLES + position * 2 * D + d).to(tl.float32)
    sin = tl.load(ANGLES + position * 2 * D + D + d).to(tl.float32)
    return (x * cos[None, :] + y * sin[None, :]).to(dtype)


@triton.jit
def _rotate_and_store(COUNTS, POSITIONS, SLOTS, QKV, K, V, K_SCALES, V_SCALES, ANGLES, Q_GAIN, K_GAIN, eps,
                      HEADS: tl.constexpr, HEADS_P: tl.constexpr, KV_HEADS: tl.constexpr, KV_P: tl.constexpr,
                      D: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    follow(PDL)
    t = tl.program_id(0)
    if t < tl.load(COUNTS + 3):
        d = tl.arange(0, D)
        position = tl.load(POSITIONS + t).to(tl.int64)
        slot = tl.load(SLOTS + t).to(tl.int64)
        QKV += t.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * D)
        head = tl.arange(0, HEADS_P)
        q = turned(QKV, head, head < HEADS, position, Q_GAIN, ANGLES, eps, D, NORM)
        kv = tl.arange(0, KV_P)
        some = (kv < KV_HEADS)[:, None]
        k = turned(QKV + HEADS * D, kv, kv < KV_HEADS, position, K_GAIN, ANGLES, eps, D, NORM)
        place = kv[:, None] * D + d[None, :]
        v = tl.load(QKV + (HEADS + KV_HEADS) * D + place, mask=some, other=0.0)
        if K_SCALES is not None:
            k, k_scale = packed(k)
            v, v_scale = packed(v)
            scale_place = (slot // BLOCK * KV_HEADS + kv) * BLOCK + slot % BLOCK
            tl.store(K_SCALES + scale_place, k_scale, mask=kv < KV_HEADS)
            tl.store(V_SCALES + scale_place, v_scale, mask=kv < KV_HEADS)
        slot *= KV_HEADS * D
        tl.store(K + slot + place, k, mask=some)
        tl.store(V + slot + place, v, mask=some)
        tl.debug_barrier()  # each head's two halves were read by threads that may not be the ones to write them
        tl.store(QKV + head[:, None] * D + d[None, :], q, mask=(head < HEADS)[:, None])


def rotate_and_store(
    batch: StepBuffer,
    qkv: torch.Tensor,
    cache: LayerCache,
    angles: torch.Tensor,
    q_gain: torch.Tensor | None,
    k_gain: torch.Tensor | None,
    eps: float,
    num_heads: int,
) -> None:
    """qkv (T, heads + 2 kv heads, D): queries turned in place; keys and values to the cache."""
    block, kv_heads, dim = cache.k.shape[-3:]
    launch(
        _rotate_and_store, (qkv.shape[0],),
        batch["counts"], batch["positions"], batch["slots"], qkv, *cache, angles, q_gain, k_gain, eps,
        num_heads, triton.next_power_of_2(num_heads), kv_heads, triton.next_power_of_2(kv_heads), dim, block,
        q_gain is not None, num_warps=4,
    )  # fmt: skip
