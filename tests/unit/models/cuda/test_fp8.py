"""Eight bits and a size per head: what is written and read back."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="kernels run in Triton's interpreter: pip install triton")

import triton
import triton.language as tl

from tonle.models.cuda.fp8 import LARGEST, read_stretched, stretched

HEADS, D = 8, 16


@triton.jit
def _there_and_back(X, CACHE, SIZES, OUT, HEADS: tl.constexpr, D: tl.constexpr):
    head = tl.arange(0, HEADS)
    place = head[:, None] * D + tl.arange(0, D)[None, :]
    packed, size = stretched(tl.load(X + place))
    tl.store(CACHE + place, packed)
    tl.store(SIZES + head, size)
    tl.store(OUT + place, read_stretched(CACHE, head * D, head < HEADS - 1, D))


def test_numbers_of_any_size_keep_their_bits() -> None:
    x = torch.randn(HEADS, D, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, HEADS)[:, None]
    x[3] = 0
    cache = torch.zeros(HEADS, D).to(torch.float8_e4m3fn)
    sizes, out = torch.zeros(HEADS), torch.full((HEADS, D), torch.nan, dtype=torch.float16)
    _there_and_back[(1,)](x, cache, sizes, out, HEADS, D)
    assert torch.equal(sizes, x.abs().amax(1))
    assert not out[-1].any()  # not inside
    back = out[:-1].float() * sizes[:-1, None] / LARGEST
    error = (back - x[:-1]).abs()
    finest = sizes[:-1, None] / LARGEST * 2.0**-9  # below 2**-6 e4m3 has equal steps of this
    assert bool((error <= torch.maximum(x[:-1].abs() / 16, finest)).all())  # three bits after the first
