# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
"""The small kernels between matrix products: norms, gated activation, what becomes of logits. Where a product does not fuse
them (`matrix.py`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tonle.models.cuda.activation import activated, gate_of
from tonle.models.cuda.launch import follow, launch
from tonle.models.spec import Activation


@triton.jit
def _rms_norm(X, GAIN, OUT, eps, HIDDEN: tl.constexpr, HP: tl.constexpr, PDL: tl.constexpr):
    h = tl.arange(0, HP)
    wide = h < HIDDEN
    gain = tl.load(GAIN + h, mask=wide, other=0.0).to(tl.float32)
    follow(PDL)
    t = tl.program_id(0).to(tl.int64)
    x = tl.load(X + t * HIDDEN + h, mask=wide, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    tl.store(OUT + t * HIDDEN + h, (x * scale * gain).to(OUT.dtype.element_ty), mask=wide)


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float, out: torch.Tensor) -> torch.Tensor:
    """x, out (T, hidden)."""
    tokens, hidden = x.shape
    launch(_rms_norm, (tokens,), x, gain, out, eps, hidden, triton.next_power_of_2(hidden), num_warps=4)
    return out


@triton.jit
def _add_normed(X, GAIN, OUT, eps, HIDDEN: tl.constexpr, HP: tl.constexpr, PDL: tl.constexpr):
    DTYPE: tl.constexpr = OUT.dtype.element_ty
    h = tl.arange(0, HP)
    wide = h < HIDDEN
    t = tl.program_id(0).to(tl.int64)
    gain = tl.load(GAIN + h, mask=wide, other=0.0).to(tl.float32)
    before = tl.load(OUT + t * HIDDEN + h, mask=wide, other=0.0).to(tl.float32)
    follow(PDL)
    x = tl.load(X + t * HIDDEN + h, mask=wide, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    normed = (x * scale * gain).to(DTYPE).to(tl.float32)  # rounded where torch rounds
    tl.store(OUT + t * HIDDEN + h, (before + normed).to(DTYPE), mask=wide)


def add_normed(x: torch.Tensor, gain: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """out (T, hidden) += the norm of x (T, hidden). The kernel ahead must be the one that writes x: it does not write out, which
    is read before that one has ended."""
    tokens, hidden = x.shape
    launch(_add_normed, (tokens,), x, gain, out, eps, hidden, triton.next_power_of_2(hidden), num_warps=4)


@triton.jit
def _norm_part(ROW, GAIN, eps, SIZE: tl.constexpr, P: tl.constexpr, PDL: tl.constexpr):
    i = tl.arange(0, P)
    some = i < SIZE
    gain = tl.load(GAIN + i, mask=some, other=0.0).to(tl.float32)
    follow(PDL)
    x = tl.load(ROW + i, mask=some, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    tl.store(ROW + i, (x * scale * gain).to(ROW.dtype.element_ty), mask=some)


@triton.jit
def _norm_whole(QKV, Q_GAIN, K_GAIN, eps, WIDTH: tl.constexpr, Q_SIZE: tl.constexpr, QP: tl.constexpr, KV_SIZE: tl.constexpr,
                KP: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One program for a token's queries, one for its keys."""
    QKV += tl.program_id(0).to(tl.int64) * WIDTH
    if tl.program_id(1) == 0:
        _norm_part(QKV, Q_GAIN, eps, Q_SIZE, QP, PDL)
    else:
        _norm_part(QKV + Q_SIZE, K_GAIN, eps, KV_SIZE, KP, PDL)


def norm_whole(qkv: torch.Tensor, q_gain: torch.Tensor, k_gain: torch.Tensor, eps: float) -> None:
    """qkv (T, q size + 2 * kv size): queries are normed over all heads together, and so are keys, in place."""
    (tokens, width), q_size, kv_size = qkv.shape, q_gain.shape[0], k_gain.shape[0]
    launch(
        _norm_whole, (tokens, 2), qkv, q_gain, k_gain, eps, width, q_size, triton.next_power_of_2(q_size), kv_size,
        triton.next_power_of_2(kv_size), num_warps=4,
    )  # fmt: skip


@triton.jit
def _gate_mul(X, OUT, SIZE: tl.constexpr, BLOCK: tl.constexpr, GLU: tl.constexpr, PDL: tl.constexpr):
    follow(PDL)
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    some = i < SIZE
    gate = tl.load(X + t * 2 * SIZE + i, mask=some, other=0.0).to(tl.float32)
    up = tl.load(X + t * 2 * SIZE + SIZE + i, mask=some, other=0.0).to(tl.float32)
    active = activated(gate, GLU).to(OUT.dtype.element_ty).to(tl.float32)  # rounded where torch rounds
    tl.store(OUT + t * SIZE + i, (active * up).to(OUT.dtype.element_ty), mask=some)


def gate_mul(x: torch.Tensor, out: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """x (T, 2 * size), gate and up side by side -> out (T, size) = activation(gate) * up."""
    tokens, size = out.shape
    block = min(1024, triton.next_power_of_2(size))
    launch(_gate_mul, (tokens, triton.cdiv(size, block)), x, out, size, block, gate_of(activation), num_warps=4)
    return out


@triton.jit
def _shape_logits(
    LOGITS, V: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, PDL: tl.constexpr
):
    follow(PDL)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    some = i < V
    place = LOGITS + tl.program_id(0).to(tl.int64) * V + i
    x = tl.load(place, mask=some, other=0.0).to(tl.float32) * SCALE
    if CAP > 0:  # cap * tanh(x / cap), as 1 - 2 / (e**2x + 1): right at both ends
        x = CAP - 2.0 * CAP / (tl.exp(x * (2.0 / CAP)) + 1.0)
    tl.store(place, x.to(LOGITS.dtype.element_ty), mask=some)


def shape_logits(logits: torch.Tensor, scale: float, soft_cap: float | None) -> None:
    """logits (S, vocab) are multiplied with `scale`, then kept within `soft_cap` by a tanh, in place."""
    rows, vocab = logits.shape
    grid = (rows, triton.cdiv(vocab, 2048))
    launch(_shape_logits, grid, logits, vocab, 2048, scale, soft_cap or 0.0, num_warps=4)
