"""Eight bits and a scale per head: what is written and read back."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="kernels run in Triton's interpreter: pip install triton")

import triton
import triton.language as tl

from tonle.models.cuda.fp8 import _bytes_of, exponent, numbers_of, packed, read_packed, reciprocal

HEADS, D = 8, 16


@triton.jit
def _there_and_back(X, CACHE, SCALES, OUT, HEADS: tl.constexpr, D: tl.constexpr):
    head = tl.arange(0, HEADS)
    place = head[:, None] * D + tl.arange(0, D)[None, :]
    numbers, scale = packed(tl.load(X + place), CACHE.dtype.element_ty)
    tl.store(CACHE + place, numbers)
    tl.store(SCALES + head, scale)
    tl.store(OUT + place, read_packed(CACHE, head * D, head < HEADS - 1, D, D))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8], ids=["by the device", "by arithmetic"])
@pytest.mark.parametrize("seed", range(5))
def test_numbers_of_any_size_keep_their_bits(seed: int, dtype: torch.dtype) -> None:
    x = torch.randn(HEADS, D, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-20, 20, HEADS)[:, None]
    x[3] = 0
    cache = torch.zeros(HEADS, D).to(dtype)
    scales, out = torch.zeros(HEADS), torch.full((HEADS, D), torch.nan, dtype=torch.float16)
    _there_and_back[(1,)](x, cache, scales, out, HEADS, D)
    assert torch.equal(torch.frexp(scales).mantissa, torch.full((HEADS,), 0.5)), "powers of two"
    largest = x.abs().amax(1) / scales
    assert bool(((largest >= 128) & (largest < 256) | (largest == 0)).all())
    assert torch.equal(out[:-1].float(), (x / scales[:, None])[:-1].to(torch.float8_e4m3fn).float())
    assert not out[-1].any()  # not inside


@triton.jit
def _powers(X, LOGS, INVERSE, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(LOGS + i, exponent(tl.load(X + i)))
    tl.store(INVERSE + i, reciprocal(tl.load(X + i)))


def test_logarithms_and_reciprocals_of_powers_of_two() -> None:
    powers = torch.arange(-64, 64, dtype=torch.float32)
    logs, inverse = torch.zeros(128), torch.zeros(128)
    _powers[(1,)](torch.exp2(powers), logs, inverse, 128)
    assert torch.equal(logs, powers) and torch.equal(inverse, torch.exp2(-powers))


@triton.jit
def _by_arithmetic(BYTES, NUMBERS, X, OUT, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(NUMBERS + i, numbers_of(tl.load(BYTES + i)))
    tl.store(OUT + i, _bytes_of(tl.load(X + i)))


@pytest.mark.parametrize("seed", range(8))
def test_arithmetic_gives_what_torch_converts(seed: int) -> None:
    """Every byte but the two that are no numbers; floats of any size, those half way between two numbers among them."""
    every = torch.arange(256, dtype=torch.uint8)
    exact = every.view(torch.float8_e4m3fn).float()
    between = (exact[:-1] + exact[1:]) / 2
    drawn = torch.randn(256, generator=torch.Generator().manual_seed(seed)) * 2.0 ** (seed * 2 - 10)
    x = torch.cat((between.nan_to_num(), torch.zeros(1))) if seed == 0 else drawn.clamp(-448, 448)
    numbers, out = torch.zeros(256), torch.zeros(256, dtype=torch.uint8)
    _by_arithmetic[(1,)](every, numbers, x, out, 256)
    real = ~exact.isnan()
    assert torch.equal(numbers[real], exact[real])
    assert torch.equal(out.view(torch.float8_e4m3fn).float(), x.to(torch.float8_e4m3fn).float())
