# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
"""Queries and keys of a mixed step: norm per head, rotation, and keys and values into the cache.

A pure decode step does the same inside its attention kernel. `turned` is shared by both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tonle.models.cuda.batch import StepBuffer
from tonle.models.cuda.fp8 import packed
from tonle.models.cuda.head_dims import in_heads, load_head, partners
from tonle.models.cuda.launch import follow, launch
from tonle.models.inputs import LayerCache
from tonle.models.rope import Rotary


def angle_table(rotary: Rotary, num_positions: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(positions, 2, rotated numbers of a head): cos, and sin with its first half negated, as `rope.rotate` wants them."""
    cos, sin = rotary.angles(torch.arange(num_positions, device=device), dtype)
    return torch.stack((cos.squeeze(1), sin.squeeze(1)), dim=1).contiguous()


@triton.jit
def angles_at(ANGLES, position, P: tl.constexpr, R: tl.constexpr):
    """Cosines and sines (P,) of a position, float32; of the first R, the rest of a head stays."""
    d = tl.arange(0, P)
    place = ANGLES + position * 2 * R + d
    if R == P:
        return tl.load(place).to(tl.float32), tl.load(place + R).to(tl.float32)
    else:
        cos = tl.load(place, mask=d < R, other=1.0)
        return cos.to(tl.float32), tl.load(place + R, mask=d < R, other=0.0).to(tl.float32)


@triton.jit
def heads_at(HEADS, head, some, D: tl.constexpr, P: tl.constexpr, R: tl.constexpr):
    """(heads, P) heads of one token, as projected, and the numbers their dimensions turn with."""
    base = HEADS + head[:, None] * D
    mask = in_heads(some, D, P)
    x = tl.load(base + tl.arange(0, P)[None, :], mask=mask, other=0.0)
    y = tl.load(base + partners(P, R)[None, :], mask=mask, other=0.0)
    return x, y


@triton.jit
def both_read(x, y, PDL: tl.constexpr):
    """x and y as they are, two tensors just read; both reads are under way before either is waited for.

    Without this triton may move x among threads, behind a barrier, before it begins to read y: twice the latency.
    """
    if PDL:
        PACK: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $2; mov.b32 $1, $3;",
            "=r,=r,r,r",
            [x, y],
            dtype=(x.dtype, y.dtype),
            is_pure=False,
            pack=PACK,
        )
    else:
        return x, y


@triton.jit
def turned(x, y, cos, sin, GAIN, eps, D: tl.constexpr, P: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr):
    """Heads (heads, P) of one token and their other halves, normed if asked for and rotated unless `cos` is None.

    Rounded where torch would round.
    """
    dtype: tl.constexpr = x.dtype
    x = x.to(tl.float32)
    y = y.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        gain = load_head(GAIN, tl.arange(0, P), D, P).to(tl.float32)
        x = (x * scale * gain[None, :]).to(dtype).to(tl.float32)
        gain = load_head(GAIN, partners(P, R), D, P).to(tl.float32)
        y = (y * scale * gain[None, :]).to(dtype).to(tl.float32)
    if cos is not None:
        return (x * cos[None, :] + y * sin[None, :]).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def _rotate_and_store(COUNTS, POSITIONS, SLOTS, QKV, K, V, K_SCALES, V_SCALES, ANGLES, Q_GAIN, K_GAIN, eps,
                      HEADS: tl.constexpr, HEADS_P: tl.constexpr, KV_HEADS: tl.constexpr, KV_P: tl.constexpr,
                      D: tl.constexpr, P: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
                      PDL: tl.constexpr):  # fmt: skip
    follow(PDL)
    t = tl.program_id(0)
    if t < tl.load(COUNTS + 3):
        d = tl.arange(0, P)
        position = tl.load(POSITIONS + t).to(tl.int64)
        slot = tl.load(SLOTS + t).to(tl.int64)
        QKV += t.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * D)
        head = tl.arange(0, HEADS_P)
        cos, sin = None, None
        if ANGLES is not None:
            cos, sin = angles_at(ANGLES, position, P, R)
        x, y = heads_at(QKV, head, head < HEADS, D, P, R)
        q = turned(x, y, cos, sin, Q_GAIN, eps, D, P, R, NORM)
        kv = tl.arange(0, KV_P)
        some = in_heads(kv < KV_HEADS, D, P)
        x, y = heads_at(QKV + HEADS * D, kv, kv < KV_HEADS, D, P, R)
        k = turned(x, y, cos, sin, K_GAIN, eps, D, P, R, NORM)
        place = kv[:, None] * D + d[None, :]
        v = tl.load(QKV + (HEADS + KV_HEADS) * D + place, mask=some, other=0.0)
        if K_SCALES is not None:
            k, k_scale = packed(k, K.dtype.element_ty)
            v, v_scale = packed(v, K.dtype.element_ty)
            scale_place = (slot // BLOCK * KV_HEADS + kv) * BLOCK + slot % BLOCK
            tl.store(K_SCALES + scale_place, k_scale, mask=kv < KV_HEADS)
            tl.store(V_SCALES + scale_place, v_scale, mask=kv < KV_HEADS)
        slot *= KV_HEADS * D
        tl.store(K + slot + place, k, mask=some)
        tl.store(V + slot + place, v, mask=some)
        tl.debug_barrier()  # each head's two halves were read by threads that may not be the ones to write them
        tl.store(QKV + head[:, None] * D + d[None, :], q, mask=in_heads(head < HEADS, D, P))


def rotate_and_store(
    batch: StepBuffer,
    qkv: torch.Tensor,
    cache: LayerCache,
    angles: torch.Tensor | None,
    q_gain: torch.Tensor | None,
    k_gain: torch.Tensor | None,
    eps: float,
    num_heads: int,
) -> None:
    """qkv (T, heads + 2 kv heads, D): queries turned in place; keys and values to the cache.

    angles (positions, 2, R): the first R numbers of each head are turned; None: nothing turns."""
    block, kv_heads, dim = cache.k.shape[-3:]
    launch(
        _rotate_and_store, (qkv.shape[0],),
        batch["counts"], batch["positions"], batch["slots"], qkv, *cache, angles, q_gain, k_gain, eps,
        num_heads, triton.next_power_of_2(num_heads), kv_heads, triton.next_power_of_2(kv_heads), dim,
        triton.next_power_of_2(dim), dim if angles is None else angles.shape[2], block, q_gain is not None, num_warps=4,
    )  # fmt: skip
