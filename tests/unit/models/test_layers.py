"""Linear maps in every layout they are stored in, and norms in low precision."""

from __future__ import annotations

import pytest
import torch

from tonle.models.layers import Linear, LinearPart, RMSNorm


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 16, 48, 49])  # on both sides of every special case
def test_every_layout_gives_the_same(num_rows: int, bias: bool) -> None:
    rows = torch.randn(num_rows, 24)
    weights = [torch.randn(10, 24), torch.randn(6, 24)]
    biases = [torch.randn(10) if bias else None, torch.randn(6) if bias else None]
    expected = torch.cat([torch.nn.functional.linear(rows, w, b) for w, b in zip(weights, biases, strict=True)], dim=-1)
    shared = Linear(*(LinearPart(w, b) for w, b in zip(weights, biases, strict=True)))
    whole_bias = torch.cat([b for b in biases if b is not None]) if bias else None
    joined = Linear(LinearPart(torch.cat(weights), whole_bias))
    transposed = Linear(LinearPart(torch.cat(weights).t().contiguous(), whole_bias, transposed=True))
    for linear in (shared, joined, transposed):
        torch.testing.assert_close(linear(rows), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_is_computed_in_float32(dtype: torch.dtype) -> None:
    x = (torch.randn(4, 64) * 300).to(dtype)  # squares overflow float16
    weight = torch.rand(64).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    out = RMSNorm(weight, 1e-6)(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)
