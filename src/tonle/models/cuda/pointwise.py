# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
"""The small kernels between matrix products: norm, gated activation. Where a product does not fuse them (`matrix.py`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tonle.models.cuda.launch import follow, launch


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
def _silu_mul(X, OUT, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    follow(PDL)
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    some = i < SIZE
    gate = tl.load(X + t * 2 * SIZE + i, mask=some, other=0.0).to(tl.float32)
    up = tl.load(X + t * 2 * SIZE + SIZE + i, mask=some, other=0.0).to(tl.float32)
    active = (gate * tl.sigmoid(gate)).to(OUT.dtype.element_ty).to(tl.float32)  # rounded where torch rounds
    tl.store(OUT + t * SIZE + i, (active * up).to(OUT.dtype.element_ty), mask=some)


def silu_mul(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """x (T, 2 * size), gate and up side by side -> out (T, size)."""
    tokens, size = out.shape
    block = min(1024, triton.next_power_of_2(size))
    launch(_silu_mul, (tokens, triton.cdiv(size, block)), x, out, size, block, num_warps=4)
    return out
